"""A KV manager for targets with recurrent layers: what it is told about requests also reaches their states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.kv import TARGET, KVLayout, KVManager, KVMetadata
from specdec_core.contracts.proposer import RequestView
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.recurrent import RequestStates


@frozen(eq=False)
class StatefulKVManager:
    """The user's KV manager, and the states of recurrent layers beside it. Implements `KVManager`.

    A request has a slot for its states from `admit` to `release`. `compact` also lets accepted draft tokens change the
    states. No token is found in a prefix cache, since no state was kept there.
    """

    kv: KVManager
    states: RequestStates

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        self.states.layers.store.add(request_id)
        return self.kv.admit(request_id, token_ids[:0], salt, groups)

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        self.kv.compact(request_ids, num_known, verdict)
        self.states.replay(request_ids, verdict)

    def release(self, request_id: str) -> None:
        self.kv.release(request_id)
        self.states.layers.store.remove(request_id)

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.states.layers.store.check_integrity()

    @property
    def num_free_blocks(self) -> int:
        return self.kv.num_free_blocks

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        return self.kv.add_group(layout, owner, lookahead)

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.cache(group, layer)

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        self.kv.reserve(request_id, num_tokens, num_scratch)

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        return self.kv.metadata(request_ids, starts, lengths)

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        self.kv.fill(group, request_ids, num_tokens)

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        self.kv.advance(requests, counts)
