"""Drives a KV manager without a model. Instead of keys and values, each KV-cache slot stores a hash of all tokens that
its keys and values would depend on. So what a slot holds can be compared with the hash that the request's own tokens
require: a slot that was lost, moved wrongly, shared with a writer or found for other tokens is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen

from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import TARGET, KVLayout, KVManager
from specdec_core.contracts.verifier import Verdict
from specdec_core.errors import CapacityError

LAYOUTS = (
    KVLayout(2, 1, 2, 1, torch.float64, keeps_nodes=True),
    KVLayout(1, 1, 1, 1, torch.float64, keeps_nodes=True),
    KVLayout(1, 1, 1, 1, torch.float64),
    KVLayout(1, 1, 1, 1, torch.float64, keeps_nodes=True),
)
HEAD, LAZY = 2, 3
"""KV groups of drafts: a head's, whose slots also depend on the next token and are filled in each step, and a draft
model's, which is filled now and then. The others are the target's."""
LOOKAHEADS = {0: 0, 1: 0, HEAD: 1, LAZY: 0}

NO_TREE = DraftTree([], [])


def content(salt: str, tokens: Sequence[int], lookahead: int = 0, slot: int | None = None) -> float:
    """Return the hash that a KV-cache slot must hold. It covers the cache salt, all tokens up to the slot's own, and
    the next `lookahead` tokens. slot: None: that of the last token."""
    seen = np.asarray(tokens if slot is None else tokens[: slot + 1 + lookahead], dtype=np.int64)
    return float(int.from_bytes(blake2b(salt.encode() + b"|" + seen.tobytes(), digest_size=6).digest(), "big"))


@define(eq=False)
class Simulated:
    """A request for the tests, which serves as the KV manager's `RequestView`.

    groups: the KV groups that the request uses besides the target's.
    num_computed: number of tokens whose keys and values the target has stored.
    filled: {KV group in `groups`: number of tokens whose keys and values are stored}.
    num_cached: number of tokens that were found in the prefix cache.
    num_blocks: number of blocks that it holds.
    """

    id: str
    salt: str
    tokens: list[int]
    groups: tuple[int, ...]
    num_computed: int = 0
    filled: dict[int, int] = field(factory=dict)
    num_cached: int = 0
    num_blocks: int = 0

    @property
    def token_ids(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int64)


@frozen
class Part:
    """One request's part of a forward pass.

    num_known: number of tokens to compute, of those that are left.
    tree: the draft. It is left out if the forward pass does not reach the request's last token.
    path: the nodes that are accepted, from the root's child downwards.
    bonus: the token that the target generates after them.
    stops: whether the request stops here. It then gets none of the new tokens and is released.
    """

    request_id: str
    num_known: int
    tree: DraftTree = NO_TREE
    path: tuple[int, ...] = ()
    bonus: int = 1
    stops: bool = False


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Return the indices of the nodes from the root's child down to `node`. The path is empty for the root (-1), for
    dead (padding) nodes and for their descendants."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path)) if node == -1 else ()


class Driver:
    """Calls the methods of a KV manager in the order in which the engine calls them, and checks the contents of its
    slots. num_hits: number of tokens found in the prefix cache, for all requests together."""

    def __init__(self, manager: KVManager, num_blocks: int, block_size: int) -> None:
        self.manager, self.num_blocks, self.block_size = manager, num_blocks, block_size
        self.requests: dict[str, Simulated] = {}
        self.num_hits = 0
        owners = (TARGET, TARGET, "head", "lazy")
        indices = [
            manager.add_group(layout, owner, LOOKAHEADS[group])
            for group, (layout, owner) in enumerate(zip(LAYOUTS, owners, strict=True))
        ]
        assert indices == [0, 1, HEAD, LAZY], f"add_group returns the group's index, from 0 on; it returned {indices}"

    def admit(self, request_id: str, salt: str, tokens: Sequence[int], groups: tuple[int, ...] = ()) -> bool:
        """Admit a request and reserve its blocks. Returns False if it does not fit."""
        request = Simulated(request_id, salt, list(tokens), groups)
        num_cached = self.manager.admit(request_id, request.token_ids, salt, groups)
        assert num_cached % self.block_size == 0, (
            f"admit finds whole blocks; it found {num_cached} tokens, with blocks of {self.block_size}: round down"
        )
        assert 0 <= num_cached < len(tokens), (
            f"admit leaves the last token to be computed, for its logits; of {len(tokens)} tokens it found {num_cached}"
        )
        request.num_blocks = num_cached // self.block_size
        if not self._reserve(request, len(tokens), 1):
            self.manager.release(request_id)
            return False
        request.num_computed = request.num_cached = num_cached
        request.filled = dict.fromkeys(groups, num_cached)
        self.num_hits += num_cached
        self.requests[request_id] = request
        self.check(request)
        return True

    def step(
        self, request_id: str, num_known: int, accepted: Sequence[int] = (), bonus: int = 1, *, stops: bool = False
    ) -> bool:
        """Simulate one forward pass over a request's next num_known tokens and a chain of accepted draft tokens.
        Returns False if the KV manager has too few free blocks, else True."""
        tree = DraftTree(list(accepted), list(range(-1, len(accepted) - 1)))
        return not self.run([Part(request_id, num_known, tree, tuple(range(len(accepted))), bonus, stops)])

    def run(self, parts: Sequence[Part]) -> list[str]:
        """Simulate one forward pass over a batch. Returns the ids of the requests that do not fit, which are left
        out."""
        wanted = [self._clipped(part) for part in parts]
        fits = [self._reserve(self.requests[p.request_id], self._end(p), len(p.tree.token_ids)) for p in wanted]
        parts = [part for part, has_room in zip(wanted, fits, strict=True) if has_room]
        if parts:
            self._forward(parts)
            ids = [part.request_id for part in parts]
            self.manager.compact(ids, [part.num_known for part in parts], verdict_of(parts))
            self._observe(parts)
            self._advance(parts)
            self.check_all()
        return [part.request_id for part, has_room in zip(wanted, fits, strict=True) if not has_room]

    def catch_up(self, request_id: str, num_tokens: int) -> None:
        """Fill the KV group of a draft model up to num_tokens. A draft model falls behind while it does not draft, and
        computes the missing keys and values when it drafts again."""
        request = self.requests[request_id]
        end = min(num_tokens, request.num_computed)
        if LAZY in request.groups and end > request.filled[LAZY]:
            start = request.filled[LAZY]
            values = [content(request.salt, request.tokens, slot=slot) for slot in range(start, end)]
            self._write(LAZY, [request], [start], [values])
            request.filled[LAZY] = end
            self.manager.fill(LAZY, [request_id], [end])

    def release(self, request_id: str) -> None:
        self.manager.release(request_id)
        self.requests.pop(request_id, None)

    def check_all(self) -> None:
        """Check the contents of all slots, and the number of free blocks."""
        self.manager.check_integrity()
        for request in self.requests.values():
            self.check(request)
        least = self.num_blocks - sum(request.num_blocks for request in self.requests.values())
        assert self.manager.num_free_blocks >= least, (
            f"a request holds the blocks of its final slots after `advance`, and none after `release`; "
            f"{self.manager.num_free_blocks} blocks are free, and at least {least} should be"
        )

    def check(self, request: Simulated) -> None:
        """Assert that each filled KV-cache slot of the request holds the hash that the request's tokens require."""
        ends = {0: request.num_computed, 1: request.num_computed, **request.filled}
        for group, end in ends.items():
            last = min(end, len(request.tokens) - LOOKAHEADS[group])
            if last <= 0:
                continue
            slots = self._slots([request], [0], [last])
            expected = [content(request.salt, request.tokens, LOOKAHEADS[group], slot) for slot in range(last)]
            for layer in range(LAYOUTS[group].num_layers):
                for cache in self.manager.cache(group, layer):
                    found = cache[slots].flatten(1).T.tolist()
                    wrong = [i for i in range(last) if any(column[i] != expected[i] for column in found)]
                    assert not wrong, (
                        f"a slot holds the keys and values of its request's own tokens; of {last} slots of request "
                        f"{request.id!r}, {request.num_cached} of them found in the cache, {wrong} do not, in group "
                        f"{group}, layer {layer}: was a block shared with a request that writes to it, found for other "
                        f"tokens, another salt or a group that did not fill it, or an accepted node not moved?"
                    )

    def _clipped(self, part: Part) -> Part:
        request = self.requests[part.request_id]
        num_left = len(request.tokens) - request.num_computed
        if part.num_known >= num_left:
            return evolve(part, num_known=num_left)
        return evolve(part, tree=NO_TREE, path=(), stops=False)

    def _end(self, part: Part) -> int:
        return self.requests[part.request_id].num_computed + part.num_known

    def _reserve(self, request: Simulated, num_tokens: int, num_scratch: int) -> bool:
        needed = max(request.num_blocks, -(-(num_tokens + num_scratch) // self.block_size))
        missing, free = needed - request.num_blocks, self.manager.num_free_blocks
        try:
            self.manager.reserve(request.id, num_tokens, num_scratch)
        except CapacityError:
            assert missing > free, f"reserve raised CapacityError for {missing} blocks, with {free} free"
            now = self.manager.num_free_blocks
            assert now == free, f"reserve changes nothing if it raises CapacityError; {now} blocks are free, not {free}"
            return False
        assert missing <= free, (
            f"reserve raises CapacityError if too few blocks are free; it gave {missing} with {free} free"
        )
        request.num_blocks = needed
        return True

    def _forward(self, parts: Sequence[Part]) -> None:
        """Write the keys and values of known and draft tokens, and what a head leaves in its scratch slots."""
        requests = [self.requests[part.request_id] for part in parts]
        starts = [request.num_computed for request in requests]
        values = []
        for part, request in zip(parts, requests, strict=True):
            text = request.tokens[: self._end(part)]
            known = [content(request.salt, text, slot=slot) for slot in range(request.num_computed, len(text))]
            paths = [path_to(part.tree, node) for node in range(len(part.tree.token_ids))]
            nodes = [content(request.salt, [*text, *(part.tree.token_ids[i] for i in path)]) for path in paths]
            values.append([*known, *nodes])
        self._check_writers(requests, starts, [len(each) for each in values])
        is_ready = [request.filled.get(LAZY) == request.num_computed for request in requests]
        lazy = [i for i, part in enumerate(parts) if part.tree.token_ids and is_ready[i]]  # a draft model that drafts
        self._write(0, requests, starts, values)
        self._write(1, requests, starts, values)
        self._write(LAZY, [requests[i] for i in lazy], [starts[i] for i in lazy], [values[i] for i in lazy])
        for i in lazy:
            requests[i].filled[LAZY] = self._end(parts[i]) + len(parts[i].path)
        roots = [self._end(part) - 1 for part in parts]
        self._write(HEAD, requests, roots, [[-1.0] * (1 + len(part.tree.token_ids)) for part in parts])

    def _observe(self, parts: Sequence[Part]) -> None:
        """Do what proposers do after `compact`: a head writes the slots of all tokens that became final."""
        requests, starts, values, ends = [], [], [], []
        for part in parts:
            request = self.requests[part.request_id]
            end = self._end(part) + len(part.path)
            known = [*self._text(part), part.bonus] if self._is_last(part) else request.tokens
            slots = range(request.num_computed, end)
            requests.append(request)
            starts.append(request.num_computed)
            values.append([content(request.salt, known, 1, slot) for slot in slots])
            ends.append(end)
            if HEAD in request.groups:
                request.filled[HEAD] = end
            if LAZY in request.groups:
                self.manager.fill(LAZY, [request.id], [request.filled[LAZY]])
        self._write(HEAD, requests, starts, values)
        self.manager.fill(HEAD, [request.id for request in requests], ends)  # also if the cached part lacks the head's

    def _advance(self, parts: Sequence[Part]) -> None:
        requests = [self.requests[part.request_id] for part in parts]
        for part, request in zip(parts, requests, strict=True):
            text, is_last = self._text(part), self._is_last(part)
            request.num_computed += part.num_known + len(part.path)
            request.num_blocks = -(-request.num_computed // self.block_size)
            if is_last and not part.stops:
                request.tokens = [*text, part.bonus]
        views: Any = requests  # they have what `advance` reads
        self.manager.advance(views, [part.num_known + len(part.path) for part in parts])
        for part in parts:
            if part.stops:
                self.release(part.request_id)

    def _is_last(self, part: Part) -> bool:
        return self._end(part) == len(self.requests[part.request_id].tokens)

    def _text(self, part: Part) -> list[int]:
        """The request's tokens up to the last one that the forward pass computed, and the accepted ones."""
        accepted = (part.tree.token_ids[node] for node in part.path)
        return [*self.requests[part.request_id].tokens[: self._end(part)], *accepted]

    def _check_writers(self, requests: Sequence[Simulated], starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Assert that no slot that requests are about to write to belongs to another request."""
        for request, start, length in zip(requests, starts, lengths, strict=True):
            own = set(self._slots([request], [start], [length]).tolist())
            assert len(own) == length, f"each token has a slot of its own; two of request {request.id!r} share one"
            for other in self.requests.values():
                if other is not request and other.num_computed:
                    shared = own & set(self._slots([other], [0], [other.num_computed]).tolist())
                    assert not shared, (
                        f"a request writes to no slot that another one holds; {request.id!r} is to write to slots "
                        f"{sorted(shared)} of {other.id!r}: share a block only if no request writes to it any more"
                    )

    def _slots(self, requests: Sequence[Simulated], starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        ids = [request.id for request in requests]
        metadata = self.manager.metadata(ids, starts, lengths)
        slots, tables = metadata.slot_mapping, metadata.block_tables
        assert slots.dtype == tables.dtype == torch.int64, "block_tables and slot_mapping are int64"
        size, given = self.block_size, [(b, i) for b, n in enumerate(lengths) for i in range(starts[b], starts[b] + n)]
        by_table = [int(tables[b, i // size]) * size + i % size for b, i in given]
        assert slots.tolist() == by_table, (
            f"slot i of a request is in block block_tables[request, i // block_size]; slot_mapping is {slots.tolist()} "
            f"and the tables say {by_table}"
        )
        return slots

    def _write(
        self, group: int, requests: Sequence[Simulated], starts: Sequence[int], values: Sequence[Sequence[float]]
    ) -> None:
        if not any(values):
            return
        slots = self._slots(requests, starts, [len(each) for each in values])
        flat = torch.tensor([value for each in values for value in each], dtype=torch.float64)
        for layer in range(LAYOUTS[group].num_layers):
            for cache in self.manager.cache(group, layer):
                cache[slots] = flat.view(-1, 1, 1)


def verdict_of(parts: Sequence[Part]) -> Verdict:
    """Return the verdict that accepts the path of each part."""
    width = max(len(part.path) for part in parts) + 1
    tokens = torch.full((len(parts), width), -1, dtype=torch.int64)
    rows = torch.zeros((len(parts), width), dtype=torch.int32)
    root_row = 0
    for i, part in enumerate(parts):
        own = [root_row, *(root_row + 1 + node for node in part.path)]
        rows[i] = torch.tensor(own + own[-1:] * (width - len(own)))
        tokens[i, : len(own)] = torch.tensor([*(part.tree.token_ids[node] for node in part.path), part.bonus])
        root_row += 1 + len(part.tree.token_ids)
    return Verdict(tokens, rows, torch.tensor([len(part.path) for part in parts], dtype=torch.int32))
