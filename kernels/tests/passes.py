"""Makes random forward passes like those of the engine, to test attention with. Their requests have cached tokens, new
tokens and draft trees, and each request has KV blocks of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import frozen
from hypothesis import strategies as st

from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.engine.step_batch import StepBatch
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding

CPU = torch.device("cpu")


@frozen
class Request:
    num_computed: int
    num_known: int
    parents: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_computed + self.num_known + len(self.parents)

    def path(self, token: int) -> list[int]:
        """Return the KV-cache slots, counted within the request, that one token of the forward pass attends to, in the
        order of positions.

        token: its index among the request's tokens in the forward pass.
        """
        known = list(range(self.num_computed + min(token + 1, self.num_known)))
        if token < self.num_known:
            return known
        node, up = token - self.num_known, []
        while node >= 0:
            up.append(self.num_computed + self.num_known + node)
            node = self.parents[node]
        return known + up[::-1] if node != DEAD else [self.num_computed + token]


@frozen(eq=False)
class Pass:
    requests: tuple[Request, ...]
    plan: AttentionPlan
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def features(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
        return self.query, self.keys, self.values, self.plan

    def slots(self, request: int, places: list[int]) -> torch.Tensor:
        """Map KV-cache slots of a request, counted within the request, to rows of `keys` and `values`."""
        metadata, local = self.plan.metadata, torch.tensor(places)
        size = metadata.block_size
        return metadata.block_tables[request, local // size] * size + local % size

    def rows(self, request: int) -> slice:
        lengths = self.plan.metadata.lengths
        return slice(sum(lengths[:request]), sum(lengths[: request + 1]))

    def fresh_plan(self) -> AttentionPlan:
        return AttentionPlan(self.plan.metadata, self.plan.visibility, self.plan.padding)


@frozen
class Heads:
    num_kv_heads: int = 2
    groups: int = 2
    key_dim: int = 16
    value_dim: int = 16


@st.composite
def parents(draw: Any, most: int = 12) -> tuple[int, ...]:
    """Draw the parent of each draft token, for a chain or for a tree with dead (padding) nodes. A parent is the index
    of a draft token, -1 for the root (the request's last token) or DEAD for a dead node. All descendants of a dead node
    are dead, as in the engine."""
    num_nodes = draw(st.integers(0, most))
    if draw(st.booleans()):
        return tuple(range(-1, num_nodes - 1))
    found: list[int] = []
    for node in range(num_nodes):
        parent = draw(st.integers(DEAD, node - 1))
        found.append(DEAD if parent >= 0 and found[parent] == DEAD else parent)
    return tuple(found)


@st.composite
def requests(draw: Any) -> Request:
    num_known = draw(st.sampled_from([1, 1, 1, 2, 9, 20, 70]))
    return Request(draw(st.integers(0, 300)), num_known, draw(parents()))


@st.composite
def heads(draw: Any) -> Heads:
    dims = st.sampled_from([4, 12, 16, 24, 40])
    return Heads(draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3)), draw(dims), draw(dims))


@st.composite
def passes(draw: Any, dtype: torch.dtype = torch.float32, min_size: int = 1) -> Pass:
    batch = draw(st.lists(requests(), min_size=min_size, max_size=4))
    block_size = draw(st.sampled_from([1, 3, 16]))
    return make_pass(batch, draw(heads()), block_size, dtype, draw(st.integers(0, 2**32)), draw(st.integers(0, 9)))


def make_pass(
    batch: list[Request],
    heads: Heads | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_padding: int = 0,
) -> Pass:
    """Make a forward pass of these requests with random queries, keys and values, and with KV blocks in random order.
    Cache rows that hold no token of a request are NaN, so that reading them would show in the results."""
    heads = heads or Heads()
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_blocks = [-(-request.num_tokens // block_size) for request in batch]
    blocks = iter(rng.permutation(sum(num_blocks)).tolist())
    tables = torch.zeros(len(batch), max(num_blocks), dtype=torch.int64)
    for row, n in enumerate(num_blocks):
        tables[row, :n] = torch.tensor([next(blocks) for _ in range(n)])
    starts = tuple(request.num_computed for request in batch)
    lengths = tuple(request.num_known + len(request.parents) for request in batch)
    num_tokens = sum(lengths) + num_padding
    metadata = KVMetadata(starts, lengths, tables, torch.empty(0, dtype=torch.int64), block_size)
    plan = AttentionPlan(metadata, _visibility(batch, num_tokens), Padding.of(CPU))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_slots = sum(num_blocks) * block_size
    made = Pass(
        tuple(batch),
        plan,
        normal(num_tokens, heads.num_kv_heads * heads.groups, heads.key_dim),
        normal(num_slots + 1, heads.num_kv_heads, heads.key_dim),
        normal(num_slots + 1, heads.num_kv_heads, heads.value_dim),
    )
    used = torch.cat([made.slots(b, list(range(request.num_tokens))) for b, request in enumerate(batch)])
    is_free = torch.ones(num_slots + 1, dtype=torch.bool).index_fill_(0, used, False)
    made.keys[is_free] = torch.nan
    made.values[is_free] = torch.nan
    return made


def _visibility(batch: list[Request], num_tokens: int) -> Visibility:
    trees = [DraftTree(list(range(len(request.parents))), list(request.parents)) for request in batch]
    is_chain = all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees)
    draft = Draft.from_chains([tree.token_ids for tree in trees]) if is_chain else Draft.from_trees(trees, CPU)
    schedule: Any = SimpleNamespace(
        requests=[
            SimpleNamespace(num_computed=r.num_computed, token_ids=np.zeros(r.num_tokens, dtype=np.int64))
            for r in batch
        ],
        num_known=[request.num_known for request in batch],
        num_prefill_tokens=1,
    )
    return StepBatch.of(schedule, draft, num_tokens, CPU).visibility
