"""Drives a KV manager without a model. Instead of keys and values, each KV-cache slot stores a hash of all tokens that
its keys and values would depend on.

So a test can compare what a slot holds with the hash that the request's own tokens require.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from attrs import define, field

from specdec_core import CapacityError, KVLayout

TARGET_LAYOUT = KVLayout(2, 1, 2, 1, torch.float64, keeps_nodes=True)
SECOND_LAYOUT = KVLayout(1, 1, 1, 1, torch.float64, keeps_nodes=True)
HEAD_LAYOUT = KVLayout(1, 1, 1, 1, torch.float64)
LAZY_LAYOUT = KVLayout(1, 1, 1, 1, torch.float64, keeps_nodes=True)
HEAD, LAZY = 2, 3
"""KV groups of drafts: a head's, whose slots also depend on the next token and are filled in each step, and a draft
model's, which is filled now and then."""
LOOKAHEADS = {0: 0, 1: 0, HEAD: 1, LAZY: 0}


def content(salt: str, tokens: Sequence[int], slot: int, lookahead: int) -> float:
    """Return the hash that KV-cache slot `slot` of a request must hold. It covers the cache salt, all tokens up to the
    slot's own, and the next `lookahead` tokens."""
    seen = np.asarray(tokens[: slot + 1 + lookahead], dtype=np.int64)
    return float(int.from_bytes(blake2b(salt.encode() + b"|" + seen.tobytes(), digest_size=6).digest(), "big"))


@define(eq=False)
class Simulated:
    """A request for the tests, which serves as the KV manager's `RequestView`.

    groups: the KV groups that the request uses besides the target's.
    num_computed: number of tokens whose keys and values the target has stored.
    filled: {KV group in `groups`: number of tokens whose keys and values are stored}.
    num_cached: number of tokens that were found in the prefix cache.
    """

    id: str
    salt: str
    tokens: list[int]
    groups: tuple[int, ...]
    num_computed: int = 0
    filled: dict[int, int] = field(factory=dict)
    num_cached: int = 0

    @property
    def token_ids(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int64)


class Driver:
    """Calls the methods of a KV manager in the order in which the engine calls them, and checks the contents of its
    slots. num_hits: number of tokens found in the prefix cache, for all requests together."""

    def __init__(self, manager: Any, block_size: int) -> None:
        self.manager, self.block_size = manager, block_size
        self.requests: dict[str, Simulated] = {}
        self.num_hits = 0
        assert manager.add_group(TARGET_LAYOUT, "target") == 0
        assert manager.add_group(SECOND_LAYOUT, "target") == 1
        assert manager.add_group(HEAD_LAYOUT, "head", 1) == HEAD
        assert manager.add_group(LAZY_LAYOUT, "lazy", 0) == LAZY

    def admit(self, request_id: str, salt: str, tokens: Sequence[int], groups: tuple[int, ...]) -> bool:
        request = Simulated(request_id, salt, list(tokens), groups)
        num_cached = self.manager.admit(request_id, request.token_ids, salt, groups)
        assert num_cached % self.block_size == 0
        assert 0 <= num_cached < len(tokens)
        try:
            self.manager.reserve(request_id, len(tokens), 1)
        except CapacityError:
            self.manager.release(request_id)
            return False
        request.num_computed = request.num_cached = num_cached
        request.filled = dict.fromkeys(groups, num_cached)
        self.num_hits += num_cached
        self.requests[request_id] = request
        self.check(request)
        return True

    def step(
        self, request_id: str, num_known: int, accepted: Sequence[int], bonus: int, *, stops: bool = False
    ) -> bool:
        """Simulate one forward pass over the request's next num_known tokens and a chain of accepted draft tokens.
        Returns False if the KV manager has too few free blocks, else True.

        accepted: the accepted draft tokens. They are ignored if the forward pass does not reach the request's last
            token.
        bonus: the token that the target generates after the accepted draft tokens.
        stops: whether the request stops here. It then gets none of the new tokens and is released.
        """
        request = self.requests[request_id]
        num_known = min(num_known, len(request.tokens) - request.num_computed)
        is_last = request.num_computed + num_known == len(request.tokens)
        accepted = list(accepted) if is_last else []
        end = request.num_computed + num_known + len(accepted)
        try:
            self.manager.reserve(request_id, request.num_computed + num_known, len(accepted))
        except CapacityError:
            return False
        text = [*request.tokens[: request.num_computed + num_known], *accepted]
        known = [*text, bonus] if is_last else request.tokens  # the tokens that a head may look ahead at
        for group in (0, 1, HEAD):
            self.write(request, group, known, request.num_computed, end)
        if HEAD in request.groups:
            request.filled[HEAD] = end
        self.manager.fill(HEAD, [request_id], [end])  # also if the cached part lacks the head's
        request.num_computed = end
        if is_last and not stops:
            request.tokens = known
        elif stops:
            request.tokens = request.tokens[: request.num_computed - len(accepted)]
        self.manager.advance([request], [num_known + len(accepted)])
        if stops:
            self.release(request_id)
        else:
            self.check(request)
        return True

    def catch_up(self, request_id: str, num_tokens: int) -> None:
        """Fill the KV group of a draft model up to num_tokens. A draft model falls behind while it does not draft, and
        computes the missing keys and values when it drafts again."""
        request = self.requests[request_id]
        end = min(num_tokens, request.num_computed)
        if LAZY in request.groups and end > request.filled[LAZY]:
            self.write(request, LAZY, request.tokens, request.filled[LAZY], end)
            request.filled[LAZY] = end
            self.manager.fill(LAZY, [request_id], [end])

    def release(self, request_id: str) -> None:
        self.manager.release(request_id)
        del self.requests[request_id]

    def write(self, request: Simulated, group: int, tokens: Sequence[int], start: int, end: int) -> None:
        if end == start:
            return
        slots = self.manager.metadata([request.id], [start], [end - start]).slot_mapping
        values = [content(request.salt, tokens, slot, LOOKAHEADS[group]) for slot in range(start, end)]
        layout = (TARGET_LAYOUT, SECOND_LAYOUT, HEAD_LAYOUT, LAZY_LAYOUT)[group]
        for layer in range(layout.num_layers):
            for cache in self.manager.cache(group, layer):
                cache[slots] = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)

    def check(self, request: Simulated) -> None:
        """Assert that each filled KV-cache slot of the request holds the hash that the request's tokens require."""
        ends = {0: request.num_computed, 1: request.num_computed, **request.filled}
        for group, end in ends.items():
            last = min(end, len(request.tokens) - LOOKAHEADS[group])
            if last <= 0:
                continue
            slots = self.manager.metadata([request.id], [0], [last]).slot_mapping
            expected = [content(request.salt, request.tokens, slot, LOOKAHEADS[group]) for slot in range(last)]
            found = self.manager.cache(group, 0)[0][slots][:, 0, 0].tolist()
            assert found == expected, f"group {group} of {request.id} holds something else"

    def check_all(self) -> None:
        self.manager.check_integrity()
        for request in self.requests.values():
            self.check(request)
