"""The attention mask as kernels read it (prefix lengths and ancestor bits) equals the dense mask of core's reference
attention."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings, strategies as st

from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.engine.step_batch import StepBatch
from specdec_core.ops import attention_plan
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding

CPU = torch.device("cpu")
WINDOWS = st.none() | st.integers(1, 120)


@frozen
class Request:
    """A request in one forward pass.

    num_computed: number of filled KV-cache slots. num_known: number of known tokens to compute. parents: index of each
    draft node's parent.
    """

    num_computed: int
    num_known: int
    parents: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        return self.num_computed + self.num_known + len(self.parents)


@frozen(eq=False)
class Tensors:
    """The tensors of an AttentionPlan that a kernel reads, copied to numpy."""

    token_requests: np.ndarray
    context_lens: np.ndarray
    prefix_lens: np.ndarray
    tree_start: np.ndarray
    ancestors: np.ndarray
    block_tables: np.ndarray

    @classmethod
    def of(cls, plan: AttentionPlan) -> Tensors:
        names = [attribute.name for attribute in cls.__attrs_attrs__]
        return cls(**{name: getattr(plan, name).numpy() for name in names})

    def local_slots(self, row: int) -> list[int]:
        """Return the KV-cache slots that a query row attends to, numbered within its own request."""
        prefix = list(range(self.prefix_lens[row]))
        if self.token_requests[row] < 0:
            return prefix
        first = int(self.tree_start[self.token_requests[row]])
        bits = [
            64 * i + bit for i, word in enumerate(self.ancestors[row].tolist()) for bit in range(64) if word >> bit & 1
        ]
        return prefix + [first + bit for bit in bits]

    def slots(self, row: int, block_size: int, window: int | None = None) -> list[int]:
        """Return the KV-cache slots that a query row attends to, numbered over the whole cache.

        window: length of the sliding window, or None for full attention.
        """
        local = self.local_slots(row)[-(window or 0) :]
        table = self.block_tables[self.token_requests[row]].tolist()
        return sorted(table[slot // block_size] * block_size + slot % block_size for slot in local)


def dense(plan: AttentionPlan, window: int | None = None) -> dict[int, list[int]]:
    """Return the KV-cache slots that each query row may attend to, by the dense mask of core's reference attention.

    The keys of the result are query rows of the flat batch; padding rows are left out. window: length of the sliding
    window, or None for full attention.
    """
    found: dict[int, list[int]] = {}
    for segment in plan.segments:
        num_rows = segment.token_rows.shape[1]
        is_visible = segment.mask(1, window, torch.float32)[:, 0] == 0
        for row, token in zip(segment.valid_rows.tolist(), segment.valid_tokens.tolist(), strict=True):
            b, r = divmod(row, num_rows)
            assert token not in found
            found[token] = sorted(segment.key_slots[b, is_visible[b, r]].tolist())
    return found


def agree(plan: AttentionPlan, tensors: Tensors | None = None, window: int | None = None) -> bool:
    tensors, size = tensors or Tensors.of(plan), plan.metadata.block_size
    expected = dense(plan, window)
    return all(tensors.slots(row, size, window) == slots for row, slots in expected.items())


@st.composite
def parents(draw: Any) -> tuple[int, ...]:
    """Hypothesis strategy for the parents in an empty draft, a chain, or a tree with dead (padding) nodes.

    Some drafts have more than 64 nodes, so that a row's ancestor bits need several 64-bit words.
    """
    num_nodes = draw(st.sampled_from([0, 0, 1, 5, 20, 63, 64, 65, 150]))
    kind, rng = draw(st.sampled_from(["chain", "tree"])), draw(st.randoms(use_true_random=False))
    if kind == "chain":
        return tuple(range(-1, num_nodes - 1))
    least = draw(st.sampled_from([DEAD, -1]))
    return tuple(rng.randint(least, node - 1) for node in range(num_nodes))


@st.composite
def plans(draw: Any) -> AttentionPlan:
    starts, known = st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 9, 70])
    requests = draw(st.lists(st.builds(Request, starts, known, parents()), min_size=1, max_size=5))
    padding = draw(st.sampled_from([Padding(1, 8), Padding(4, 512)]))
    return plan_of(requests, draw(st.integers(0, 5)), padding, draw(st.sampled_from([1, 3, 16])))


def plan_of(
    requests: list[Request], num_padding: int = 3, padding: Padding | None = None, block_size: int = 4
) -> AttentionPlan:
    """Return a plan as the engine makes it, with KV-cache blocks in random order. num_padding: number of padding tokens
    at the end."""
    num_blocks = [-(-request.num_slots // block_size) for request in requests]
    blocks = iter(np.random.default_rng(len(requests)).permutation(sum(num_blocks)).tolist())
    tables = torch.zeros(len(requests), max(num_blocks), dtype=torch.int64)
    for row, n in enumerate(num_blocks):
        tables[row, :n] = torch.tensor([next(blocks) for _ in range(n)])
    trees = [DraftTree(list(range(len(request.parents))), list(request.parents)) for request in requests]
    schedule: Any = SimpleNamespace(
        requests=[
            SimpleNamespace(num_computed=r.num_computed, token_ids=np.zeros(r.num_slots, dtype=np.int64))
            for r in requests
        ],
        num_known=[request.num_known for request in requests],
        num_prefill_tokens=1,
    )
    lengths = tuple(request.num_known + len(request.parents) for request in requests)
    batch = StepBatch.of(schedule, Draft.from_trees(trees, CPU), sum(lengths) + num_padding, CPU)
    starts = tuple(request.num_computed for request in requests)
    metadata = KVMetadata(starts, lengths, tables, torch.zeros(sum(lengths), dtype=torch.int64), block_size)
    return AttentionPlan(metadata, batch.visibility, padding or Padding(4, 512))


@settings(deadline=None, max_examples=80)
@given(plan=plans(), window=WINDOWS)
def test_they_say_what_the_dense_mask_says(plan: AttentionPlan, window: int | None) -> None:
    assert agree(plan)
    assert agree(plan, window=window)


@settings(deadline=None, max_examples=60)
@given(plan=plans())
def test_what_a_kernel_may_rely_on(plan: AttentionPlan) -> None:
    tensors, metadata = Tensors.of(plan), plan.metadata
    num_tokens, batch = len(plan.visibility.positions), len(metadata.lengths)
    owners = np.repeat(np.arange(batch), metadata.lengths)
    assert tensors.token_requests.tolist() == [*owners, *[-1] * (num_tokens - len(owners))]
    assert tensors.context_lens.tolist() == [sum(each) for each in zip(metadata.starts, metadata.lengths, strict=True)]
    for row in range(num_tokens):
        seen = tensors.local_slots(row)
        assert bool(seen) == (row < len(owners))
        assert seen == sorted(set(seen))
        assert all(slot < tensors.context_lens[owners[row]] for slot in seen)
    assert [tensors.ancestors.dtype, tensors.ancestors.ndim, len(tensors.ancestors)] == [np.int64, 2, num_tokens]
    names = ("token_requests", "context_lens", "prefix_lens", "tree_start", "block_tables")
    assert {getattr(tensors, name).dtype for name in names} == {np.dtype(np.int32)}
    assert np.array_equal(tensors.block_tables, metadata.block_tables.numpy())


@settings(deadline=None, max_examples=40)
@given(plan=plans())
def test_the_number_of_words(plan: AttentionPlan) -> None:
    """The ancestor bits of each row have one 64-bit word per 64 slots of the largest draft tree. If num_tree_slots is
    not given, the plan counts these slots, with the same result."""
    seen = plan.visibility
    assert seen.num_tree_slots is not None
    assert plan.ancestors.shape[1] == (0 if seen.more_slots is None else -(-seen.num_tree_slots // 64))
    counted = AttentionPlan(plan.metadata, evolve(seen, num_tree_slots=None), plan.padding)
    assert torch.equal(counted.ancestors, plan.ancestors)


def test_a_tree_and_a_chunk_of_a_prompt() -> None:
    plan = plan_of([Request(5, 3), Request(7, 1, (-1, -1, 0, DEAD, 2))], num_padding=1)
    assert plan.token_requests.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, -1]
    assert plan.context_lens.tolist() == [8, 13]
    assert plan.prefix_lens.tolist() == [6, 7, 8, 8, 8, 8, 8, 0, 8, 0]
    assert plan.tree_start.tolist() == [8, 8]
    assert plan.ancestors.tolist() == [[0], [0], [0], [0], [0b1], [0b10], [0b101], [0b1000], [0b10101], [0]]


@pytest.mark.parametrize("parents", [(), (-1, 0, 1)], ids=["prefill", "chains"])
def test_chains_and_prefill_have_no_bits(parents: tuple[int, ...]) -> None:
    plan = plan_of([Request(5, 1, parents), Request(9, 40)])
    chains = Draft.from_chains([list(parents), []])
    assert chains.is_chain
    positions = plan.visibility.positions
    plan = AttentionPlan(plan.metadata, Visibility(positions, positions + 1), plan.padding)
    assert plan.ancestors.shape == (len(positions), 0)
    assert agree(plan)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_level_of_a_draft(data: Any) -> None:
    """The ancestor bits are right if a draft model computes one level of a tree, with all ancestors in the KV cache."""
    block_size, batch = 4, data.draw(st.integers(1, 4))
    firsts = [data.draw(st.integers(0, 60)) for _ in range(batch)]  # the nodes' first slots
    before = [data.draw(st.integers(1, 90)) for _ in range(batch)]  # nodes of earlier levels
    counts = [data.draw(st.integers(0, 6)) for _ in range(batch)]
    depth = data.draw(st.integers(1, 5))
    slots, prefixes = [], []
    for first, old, count in zip(firsts, before, counts, strict=True):
        for i in range(count):
            up = sorted(data.draw(st.sets(st.integers(0, old - 1), max_size=depth - 1)), reverse=True)
            path = [old + i, *up]
            slots.append([first + node for node in path + path[-1:] * (depth - len(path))])
            prefixes.append(first)
    num_tokens, num_padding = sum(counts), data.draw(st.integers(0, 3)) + (not any(counts))
    starts = tuple(first + old for first, old in zip(firsts, before, strict=True))
    more_slots = torch.tensor(slots + [[0] * depth] * num_padding).view(num_tokens + num_padding, depth)
    prefix_lens = torch.tensor(prefixes + [0] * num_padding)
    tables = torch.arange(batch * 50).flip(0).view(batch, 50)
    metadata = KVMetadata(starts, tuple(counts), tables, torch.empty(0, dtype=torch.int64), block_size)
    plan = AttentionPlan(metadata, Visibility(prefix_lens, prefix_lens, more_slots), Padding(1, 8))
    assert agree(plan)
    assert plan.tree_start.tolist() == [f if n else 0 for f, n in zip(firsts, counts, strict=True)]


TREES = [Request(40, 70), Request(30, 1, (-1, -1, 0, 0, 1, DEAD, 4)), Request(9, 1, tuple(range(-1, 70)))]


def test_one_row_of_each_request() -> None:
    """`of_rows` reduces a plan to one query row per request. The row attends to the same slots as in the whole plan."""
    plan = plan_of(TREES)
    rows = [3, 76, 79]
    some = plan.of_rows(torch.tensor([*rows, 0]))
    assert some.token_requests.tolist() == [0, 1, 2, -1]
    whole, tensors = Tensors.of(plan), Tensors.of(some)
    for row, original in enumerate(rows):
        assert tensors.local_slots(row) == whole.local_slots(original)
        assert max(tensors.local_slots(row)) < tensors.context_lens[row]


def bits_one_too_high(tensors: Tensors) -> Tensors:
    return evolve(tensors, ancestors=tensors.ancestors << 1)


def trees_start_one_too_late(tensors: Tensors) -> Tensors:
    return evolve(tensors, tree_start=tensors.tree_start + 1)


def rows_of_the_next_request(tensors: Tensors) -> Tensors:
    shifted = np.where(tensors.token_requests < 0, -1, (tensors.token_requests + 1) % len(tensors.context_lens))
    return evolve(tensors, token_requests=shifted)


def prefixes_one_too_short(tensors: Tensors) -> Tensors:
    return evolve(tensors, prefix_lens=np.maximum(tensors.prefix_lens - 1, 0))


def the_second_word_is_lost(tensors: Tensors) -> Tensors:
    return evolve(tensors, ancestors=tensors.ancestors[:, :1])


def no_bits(tensors: Tensors) -> Tensors:
    return evolve(tensors, ancestors=tensors.ancestors[:, :0])


FAULTS = [
    bits_one_too_high,
    trees_start_one_too_late,
    rows_of_the_next_request,
    prefixes_one_too_short,
    the_second_word_is_lost,
    no_bits,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Callable[[Tensors], Tensors]) -> None:
    plan = plan_of(TREES)
    tensors = Tensors.of(plan)
    assert agree(plan, tensors)
    assert not agree(plan, fault(tensors))


def test_they_are_made_once_and_not_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(TREES)
    assert plan.ancestors is plan.ancestors
    monkeypatch.setattr(attention_plan, "ancestor_bits", None)
    plan = plan_of(TREES)
    num_tokens, num_slots = len(plan.visibility.positions), 4 * (int(plan.metadata.block_tables.max()) + 1)
    caches = [torch.randn(num_slots + 1, 1, 4) for _ in range(2)]
    assert paged_attention(torch.randn(num_tokens, 2, 4), *caches, plan, 0.5).isfinite().all()


def test_the_host_does_not_wait_for_the_device() -> None:
    """If num_tree_slots is given, the plan reads no value from the device. On the meta device, reading would raise."""
    plan = plan_of(TREES)
    metadata = evolve(plan.metadata, block_tables=plan.metadata.block_tables.to("meta"))
    seen = plan.visibility
    tensors = (seen.positions, seen.prefix_lens, seen.more_slots)
    there = AttentionPlan(metadata, Visibility(*(t.to("meta") for t in tensors), seen.num_tree_slots), plan.padding)
    for name in ("token_requests", "context_lens", "prefix_lens", "tree_start", "ancestors", "block_tables"):
        assert getattr(there, name).is_meta
        assert getattr(there, name).shape == getattr(plan, name).shape
    with pytest.raises(RuntimeError, match="meta"):
        AttentionPlan(metadata, evolve(there.visibility, num_tree_slots=None), plan.padding).ancestors  # noqa: B018
