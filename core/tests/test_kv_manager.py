"""Compares PagedKVManager with a naive model, and checks that the comparison detects deliberate bugs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_kv import LAYOUTS, NaiveKV, Pass, assert_matches, path_to

from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import KVContext
from specdec_core.contracts.verifier import Verdict
from specdec_core.errors import CapacityError

IDS = ["a", "b", "c", "d", "e"]


def paged(num_blocks: int, block_size: int) -> Any:
    from specdec_core.kv import PagedKVManager

    return PagedKVManager(KVContext(num_blocks, block_size, torch.device("cpu")))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 7) -> DraftTree:
    """Hypothesis strategy for draft trees: chains half of the time, otherwise random trees with dead (padding)
    nodes."""
    num_nodes = draw(st.integers(0, max_nodes))
    if draw(st.booleans()):
        parents = list(range(-1, num_nodes - 1))
    else:
        parents = [draw(st.integers(-2, i - 1)) for i in range(num_nodes)]
    return DraftTree([100 + i for i in range(num_nodes)], parents)


@st.composite
def passes(draw: st.DrawFn, request_id: str) -> Pass:
    num_known = draw(st.one_of(st.just(1), st.integers(1, 9)))
    tree = draw(trees())
    path = path_to(tree, draw(st.integers(-1, len(tree.token_ids) - 1)))
    return Pass(request_id, num_known, tree, path, extra_scratch=draw(st.integers(0, 3)))


batches = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True).flatmap(
    lambda ids: st.tuples(*(passes(i) for i in ids))
)


class PagedMachine(RuleBasedStateMachine):
    block_size = 4

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        num_blocks *= max(1, 16 // self.block_size)
        self.naive = NaiveKV(paged(num_blocks, self.block_size), num_blocks, self.block_size)

    @rule(batch=batches, observe=st.booleans())
    def run_and_commit(self, batch: Sequence[Pass], observe: bool) -> None:
        self.naive.run(batch, observe=observe)

    @rule(batch=batches)
    def run_without_commit(self, batch: Sequence[Pass]) -> None:
        """Preempt requests between the forward pass and the commit."""
        for p in self.naive.run(batch, commit=False):
            self.naive.release(p.request_id)

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data(), num_scratch=st.integers(0, 40))
    def reserve_more(self, data: st.DataObject, num_scratch: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive.requests)))
        self.naive.reserve(request_id, self.naive.requests[request_id].committed + 1, num_scratch)

    @rule(request_id=st.sampled_from([*IDS, "new"]))
    def reserve_too_much(self, request_id: str) -> None:
        """A reservation that fails changes nothing. The invariant `matches` checks this."""
        blocks = self.naive.num_free + 1
        if request_id in self.naive.requests:
            blocks += self.naive.requests[request_id].owned_blocks
        assert not self.naive.reserve(request_id, blocks * self.block_size, 0)

    @rule(request_id=st.sampled_from([*IDS, "unknown"]))
    def cancel(self, request_id: str) -> None:
        self.naive.release(request_id)

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data())
    def preempt_and_admit_again(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive.requests)))
        num_tokens = self.naive.requests[request_id].committed + 1
        self.naive.release(request_id)
        self.naive.run([Pass(request_id, num_tokens)])

    @invariant()
    def matches(self) -> None:
        if hasattr(self, "naive"):
            assert_matches(self.naive)

    def teardown(self) -> None:
        if hasattr(self, "naive"):
            for request_id in list(self.naive.requests):
                self.naive.release(request_id)
            assert self.naive.manager.num_free_blocks == self.naive.num_blocks


class PagedMachineBlock1(PagedMachine):
    block_size = 1


class PagedMachineBlock16(PagedMachine):
    block_size = 16


TestBlockSize1, TestBlockSize4, TestBlockSize16 = (
    machine.TestCase for machine in (PagedMachineBlock1, PagedMachine, PagedMachineBlock16)
)
for machine in (TestBlockSize1, TestBlockSize4, TestBlockSize16):
    machine.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
del machine


class Faulty:
    """Wraps a PagedKVManager. Each subclass adds one deliberate bug."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.inner = paged(num_blocks, block_size)
        self.committed: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        self.inner.compact(request_ids, num_known, verdict)

    def advance(self, requests: Sequence[Any], counts: Sequence[int]) -> None:
        self.inner.advance(requests, counts)
        for request, count in zip(requests, counts, strict=True):
            self.committed[request.id] = self.committed.get(request.id, 0) + count

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)
        self.committed.pop(request_id, None)

    def kept_caches(self) -> list[torch.Tensor]:
        layers = [(g, i) for g, layout in enumerate(LAYOUTS) if layout.keeps_nodes for i in range(layout.num_layers)]
        return [cache for group, layer in layers for cache in self.inner.cache(group, layer)]


class MovesNothing(Faulty):
    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        before = [cache.clone() for cache in self.kept_caches()]
        super().compact(request_ids, num_known, verdict)
        for cache, old in zip(self.kept_caches(), before, strict=True):
            cache.copy_(old)


class MovesTheWrongNode(Faulty):
    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        rows = verdict.rows.clone()
        rows[:, 1:] = torch.maximum(rows[:, 1:] - 1, rows[:, :1] + 1)
        super().compact(request_ids, num_known, attrs.evolve(verdict, rows=rows))


class OverlapsSourceAndDestination(Faulty):
    """A deliberate bug: the cache entries of accepted nodes are moved one by one, last node first. So a move may
    overwrite an entry that has yet to be moved."""

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        before = [cache.clone() for cache in self.kept_caches()]
        moves = []
        for i, request_id in enumerate(request_ids):
            start = self.committed.get(request_id, 0) + num_known[i]
            nodes = (verdict.rows[i] - verdict.rows[i, 0] - 1).tolist()
            length = max(nodes) + 1
            slots = self.inner.metadata([request_id], [start], [length]).slot_mapping.tolist() if length else []
            accepted = int(verdict.num_accepted[i])
            moves += [(slots[nodes[j]], slots[j - 1]) for j in range(accepted, 0, -1)]
        super().compact(request_ids, num_known, verdict)
        for cache, old in zip(self.kept_caches(), before, strict=True):
            cache.copy_(old)
            for source, destination in moves:
                cache[destination] = cache[source]


class LeaksABlock(Faulty):
    def release(self, request_id: str) -> None:
        super().release(request_id)
        leak = f"leak {self.inner.num_free_blocks}"
        self.inner.admit(leak, np.arange(1), "", ())
        self.inner.reserve(leak, 1, 0)


class SharesABlock(Faulty):
    """A deliberate bug: `metadata` returns the first request's KV-cache slots for every request of a batch."""

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> Any:
        return self.inner.metadata([request_ids[0]] * len(request_ids), starts, lengths)


class ForgetsToAdvance(Faulty):
    """A deliberate bug: `advance` commits one token too few for each request."""

    def advance(self, requests: Sequence[Any], counts: Sequence[int]) -> None:
        super().advance(requests, [max(0, count - 1) for count in counts])


def run_scenario(manager: Any, num_blocks: int, block_size: int, seed: int) -> None:
    """Run 40 random batches through a KV manager and its naive model, and compare them after each batch."""
    rng = np.random.default_rng(seed)
    naive = NaiveKV(manager, num_blocks, block_size)
    for _ in range(40):
        batch = []
        for request_id in rng.choice(IDS, size=rng.integers(1, 4), replace=False).tolist():
            num_nodes = int(rng.integers(0, 9))
            parents = [int(rng.integers(-2, i)) if rng.random() < 0.5 else i - 1 for i in range(num_nodes)]
            tree = DraftTree(list(range(num_nodes)), parents)
            batch.append(
                Pass(request_id, int(rng.integers(1, 4)), tree, path_to(tree, int(rng.integers(-1, num_nodes))))
            )
        naive.run(batch, observe=rng.random() < 0.5)
        assert_matches(naive)
        if rng.random() < 0.3:
            naive.release(str(rng.choice(IDS)))
            assert_matches(naive)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_scenario_passes_without_a_fault(block_size: int) -> None:
    for seed in range(5):
        run_scenario(Faulty(256 // block_size, block_size), 256 // block_size, block_size, seed)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "fault",
    [MovesNothing, MovesTheWrongNode, OverlapsSourceAndDestination, LeaksABlock, SharesABlock, ForgetsToAdvance],
)
def test_comparison_notices(fault: type[Faulty], block_size: int) -> None:
    num_blocks = 256 // block_size
    with pytest.raises((AssertionError, IndexError, CapacityError)):
        run_scenario(fault(num_blocks, block_size), num_blocks, block_size, seed=0)


def test_release_of_an_unknown_id_is_ignored() -> None:
    manager = paged(4, 4)
    manager.release("never seen")
    manager.check_integrity()
    assert manager.num_free_blocks == 4


def test_padding_row_is_the_last_and_takes_writes_to_minus_one() -> None:
    manager = paged(3, 4)
    group = manager.add_group(LAYOUTS[0])
    manager.admit("a", np.arange(12), "", ())
    manager.reserve("a", 12, 0)
    keys, values = manager.cache(group, 0)
    assert keys.shape == (13, 2, 3)
    assert values.shape == (13, 2, 2)
    keys.zero_()
    keys[torch.tensor([-1])] = 1.0
    slots = manager.metadata(["a"], [0], [12]).slot_mapping
    assert sorted(slots.tolist()) == list(range(12))
    assert not keys[slots].any()


def test_metadata_of_inner_intervals_addresses_the_same_slots() -> None:
    manager = paged(8, 4)
    manager.add_group(LAYOUTS[0])
    manager.admit("a", np.arange(10), "", ())
    manager.reserve("a", 10, 3)
    manager.admit("b", np.arange(5), "", ())
    manager.reserve("b", 5, 0)
    whole = manager.metadata(["a", "b"], [0, 0], [13, 5]).slot_mapping.tolist()
    inner = manager.metadata(["b", "a"], [2, 9], [3, 4]).slot_mapping.tolist()
    assert inner == whole[13 + 2 :] + whole[9:13]
    assert manager.metadata(["a"], [4], [0]).slot_mapping.shape == (0,)


def test_cache_of_a_group_is_not_shared_with_another() -> None:
    manager = paged(4, 4)
    first, second = manager.add_group(LAYOUTS[0]), manager.add_group(LAYOUTS[0])
    caches = [*manager.cache(first, 0), *manager.cache(first, 1), *manager.cache(second, 0), *manager.cache(second, 1)]
    for number, cache in enumerate(caches):
        cache.fill_(number)
    assert [float(cache.mean()) for cache in caches] == list(range(8))


def test_slots_past_what_a_request_owns_are_refused() -> None:
    """Asking for KV-cache slots past a request's own blocks raises CapacityError."""
    manager = paged(8, 4)
    manager.add_group(LAYOUTS[0])
    manager.admit("a", np.arange(5), "", ())
    manager.reserve("a", 5, 3)
    manager.admit("b", np.arange(9), "", ())
    manager.reserve("b", 9, 0)
    assert len(manager.metadata(["a", "b"], [5, 0], [3, 12]).slot_mapping) == 15
    with pytest.raises(CapacityError, match=r"'a' holds 8 KV slots.*\[5, 9\).*scratch_slots"):
        manager.metadata(["a", "b"], [5, 0], [4, 12])
