"""A naive KV manager that tests compare with the real one. It keeps each request's KV cache in Python lists.

Every write uses a new value. `assert_matches` reads the committed slots back through the real manager's `metadata` and
`cache`, so it detects any slot that was lost, moved wrongly, aliased or shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import attrs
import numpy as np
import torch
from attrs import define, field, frozen

from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import KVLayout, KVManager
from specdec_core.contracts.verifier import Verdict
from specdec_core.errors import CapacityError

LAYOUTS = (
    KVLayout(num_layers=2, num_kv_heads=2, key_dim=3, value_dim=2, dtype=torch.float32, keeps_nodes=True),
    KVLayout(num_layers=1, num_kv_heads=1, key_dim=2, value_dim=4, dtype=torch.float32, keeps_nodes=True),
    KVLayout(num_layers=2, num_kv_heads=1, key_dim=1, value_dim=1, dtype=torch.float32, keeps_nodes=False),
)


@define
class NaiveRequest:
    committed: int = 0
    owned_blocks: int = 0
    slots: list[list[int]] = field(factory=lambda: [[] for _ in LAYOUTS])  # per group; 0: nothing was written there

    def write(self, group: int, start: int, values: Sequence[int]) -> None:
        slots = self.slots[group]
        slots.extend([0] * (start + len(values) - len(slots)))
        slots[start : start + len(values)] = values


@frozen
class View:
    """A stand-in for a RequestView (a request as plugins see it), with the two attributes that `KVManager.advance`
    reads."""

    id: str
    token_ids: np.ndarray


NO_TREE = DraftTree([], [])


@define
class Pass:
    """One request's part of a forward pass.

    num_known: number of known tokens (not draft tokens) that are computed.
    tree: the draft tokens.
    path: indices of the tree nodes that will be accepted, from the root's child downwards.
    extra_scratch: number of KV-cache slots to reserve beyond those of the tree.
    """

    request_id: str
    num_known: int
    tree: DraftTree = NO_TREE
    path: tuple[int, ...] = ()
    extra_scratch: int = 0


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Return the indices of the nodes from the root's child down to `node`.

    The path is empty for the root (-1), for dead (padding) nodes and for their descendants.
    """
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path)) if node == -1 else ()


def build_verdict(passes: Sequence[Pass], extra_width: int = 0) -> Verdict:
    width = max((len(p.path) for p in passes), default=0) + 1 + extra_width
    tokens = torch.full((len(passes), width), -1, dtype=torch.int64)
    rows = torch.zeros((len(passes), width), dtype=torch.int32)
    root_row = 0
    for i, p in enumerate(passes):
        own = [root_row, *(root_row + 1 + node for node in p.path)]
        rows[i] = torch.tensor(own + own[-1:] * (width - len(own)))
        tokens[i, : len(own)] = torch.tensor([*(p.tree.token_ids[node] for node in p.path), 7])
        root_row += 1 + len(p.tree.token_ids)
    return Verdict(tokens, rows, torch.tensor([len(p.path) for p in passes], dtype=torch.int32))


class NaiveKV:
    """Applies the same operations to the real KV manager and to its naive model."""

    def __init__(self, manager: KVManager, num_blocks: int, block_size: int) -> None:
        self.manager = manager
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.requests: dict[str, NaiveRequest] = {}
        self._fresh = count(1)
        assert [manager.add_group(layout) for layout in LAYOUTS] == list(range(len(LAYOUTS)))

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(request.owned_blocks for request in self.requests.values())

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> bool:
        """Reserve KV-cache slots for a request in the real manager and in the naive model.

        Returns False if too few blocks are free, after asserting that the real manager raises CapacityError.
        """
        request = self.requests.get(request_id, NaiveRequest())
        if request_id not in self.requests:
            assert self.manager.admit(request_id, np.arange(num_tokens), "", ()) == 0
        owned = max(request.owned_blocks, -(-(num_tokens + num_scratch) // self.block_size))
        if owned - request.owned_blocks > self.num_free:
            try:
                self.manager.reserve(request_id, num_tokens, num_scratch)
            except CapacityError:
                if request_id not in self.requests:
                    self.manager.release(request_id)
                return False
            raise AssertionError(f"reserved {owned} blocks for {request_id} with {self.num_free} free")
        self.manager.reserve(request_id, num_tokens, num_scratch)
        self.requests[request_id] = attrs.evolve(request, owned_blocks=owned)
        return True

    def run(self, passes: Sequence[Pass], *, commit: bool = True, observe: bool = True) -> list[Pass]:
        """Simulate a forward pass: reserve KV-cache slots, then write keys and values of known and draft tokens.

        commit: whether the nodes of each entry's `path` are then accepted.
        observe: whether, after the commit, the draft model's keys and values of known and accepted tokens are written.

        Entries of `passes` for which too few blocks are free are skipped. Returns the others.
        """
        passes = [p for p in passes if self._reserve_for(p)]
        for group, layout in enumerate(LAYOUTS):
            if layout.keeps_nodes:
                starts = [self.requests[p.request_id].committed for p in passes]
                lengths = [p.num_known + len(p.tree.token_ids) for p in passes]
            else:  # scratch, from the root's slot on
                starts = [self.requests[p.request_id].committed + p.num_known - 1 for p in passes]
                lengths = [1 + len(p.tree.token_ids) for p in passes]
            self._write(group, [p.request_id for p in passes], starts, lengths)
        if commit and passes:
            self._commit(passes, observe)
        return list(passes)

    def release(self, request_id: str) -> None:
        self.manager.release(request_id)
        self.requests.pop(request_id, None)

    def _reserve_for(self, p: Pass) -> bool:
        committed = self.requests[p.request_id].committed if p.request_id in self.requests else 0
        return self.reserve(p.request_id, committed + p.num_known, len(p.tree.token_ids) + p.extra_scratch)

    def _commit(self, passes: Sequence[Pass], observe: bool) -> None:
        ids = [p.request_id for p in passes]
        self.manager.compact(ids, [p.num_known for p in passes], build_verdict(passes))
        before = [self.requests[i].committed for i in ids]
        for p in passes:
            request = self.requests[p.request_id]
            end_of_known = request.committed + p.num_known
            request.committed = end_of_known + len(p.path)
            request.owned_blocks = -(-request.committed // self.block_size)
            for layout, slots in zip(LAYOUTS, request.slots, strict=True):
                if layout.keeps_nodes:
                    slots[end_of_known:] = [slots[end_of_known + node] for node in p.path]
                else:
                    slots.extend([0] * (request.committed - len(slots)))
                    del slots[request.committed :]
        if observe:
            lengths = [self.requests[i].committed - start for i, start in zip(ids, before, strict=True)]
            for group, layout in enumerate(LAYOUTS):
                if not layout.keeps_nodes:
                    self._write(group, ids, before, lengths)
        views = [View(i, np.arange(self.requests[i].committed + 1)) for i in ids]
        self.manager.advance(views, [p.num_known + len(p.path) for p in passes])

    def _write(self, group: int, ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> None:
        if not ids:
            return
        values = [[next(self._fresh) for _ in range(length)] for length in lengths]
        metadata = self.manager.metadata(ids, starts, lengths)
        flat = torch.tensor([v for row in values for v in row])
        for layer in range(LAYOUTS[group].num_layers):
            for cache, sign in zip(self.manager.cache(group, layer), (1, -1), strict=True):
                cache[metadata.slot_mapping] = sign * _fill(flat, layer, cache.shape[1:])
        for request_id, start, row in zip(ids, starts, values, strict=True):
            self.requests[request_id].write(group, start, row)


def _fill(values: torch.Tensor, layer: int, shape: Sequence[int]) -> torch.Tensor:
    """Return keys or values for n tokens, float32 [n, *shape], in which no two numbers are equal.

    values: a unique number for each token. layer: index of the layer in its cache group.
    """
    pattern = torch.arange(torch.Size(shape).numel()).view(1, *shape) / 64 + layer / 4
    return values.view(-1, *(1 for _ in shape)).to(torch.float32) + pattern


def assert_matches(naive: NaiveKV) -> None:
    """Assert that the real manager agrees with the naive model: cached values, slot addresses and the number of free
    blocks.

    The real manager's own integrity check must succeed too.
    """
    manager, size = naive.manager, naive.block_size
    manager.check_integrity()
    assert manager.num_free_blocks == naive.num_free
    ids = [i for i, request in naive.requests.items() if request.committed]
    if not ids:
        return
    lengths = [naive.requests[i].committed for i in ids]
    metadata = manager.metadata(ids, [0] * len(ids), lengths)
    assert metadata.starts == (0,) * len(ids)
    assert metadata.lengths == tuple(lengths)
    assert metadata.block_size == size
    assert metadata.slot_mapping.dtype == metadata.block_tables.dtype == torch.int64
    slots = metadata.slot_mapping.tolist()
    assert len(set(slots)) == len(slots), "two tokens share a slot"
    assert all(0 <= slot < naive.num_blocks * size for slot in slots)
    tables = metadata.block_tables.tolist()
    by_table = [tables[b][i // size] * size + i % size for b, n in enumerate(lengths) for i in range(n)]
    assert slots == by_table, "block table and slot mapping disagree"
    for group, layout in enumerate(LAYOUTS):
        flat = torch.tensor([v for i in ids for v in naive.requests[i].slots[group][: naive.requests[i].committed]])
        written = flat > 0
        for layer in range(layout.num_layers):
            for cache, sign in zip(manager.cache(group, layer), (1, -1), strict=True):
                assert cache.shape[0] == naive.num_blocks * size + 1
                expected = sign * _fill(flat, layer, cache.shape[1:])
                assert torch.equal(cache[metadata.slot_mapping][written], expected[written]), (
                    f"group {group} layer {layer}: committed slots do not hold what was written for them"
                )
