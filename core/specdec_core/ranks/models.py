"""A model and a KV manager whose calls the other ranks repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from specdec_core.contracts.kv import TARGET, KVLayout, KVManager, KVMetadata, Visibility
from specdec_core.contracts.proposer import Plan, RequestView
from specdec_core.contracts.verifier import Verdict
from specdec_core.kv.states import StateStore
from specdec_core.models import Model
from specdec_core.models.attention import PagedAttention
from specdec_core.models.load import ModelSource
from specdec_core.models.recurrent import StatePlan
from specdec_core.ranks.digests import digest
from specdec_core.ranks.driver import Ranks
from specdec_core.ranks.requests import Sent, Slots


class SharedKV:
    """A `KVManager` whose calls the other ranks repeat with their own, before the next forward pass. A call that raises
    is not repeated: it changed nothing, or the engine releases its requests.

    kv: this rank's.
    """

    def __init__(self, kv: KVManager, ranks: Ranks) -> None:
        self._kv, self._ranks, self._sent = kv, ranks, Sent()
        self._slots: WeakKeyDictionary[KVMetadata, Slots] = WeakKeyDictionary()

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        return self.add_groups(layout, layout, owner, lookahead)

    def add_groups(self, layout: KVLayout, others: KVLayout, owner: str, lookahead: int) -> int:
        """Allocate storage with `layout` here, and with `others` on the other ranks."""
        with self._ranks.undivided():
            group = self._kv.add_group(layout, owner, lookahead)
            self._ranks.later("add_group", others, owner, lookahead)
        return group

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv.cache(group, layer)

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        with self._ranks.undivided():
            found = self._kv.admit(request_id, token_ids, salt, groups)
            self._ranks.later("admit", request_id, token_ids.copy(), salt, tuple(groups), found)
        return found

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        with self._ranks.undivided():
            self._kv.reserve(request_id, num_tokens, num_scratch)
            self._ranks.later("reserve", request_id, num_tokens, num_scratch)

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        found = self._kv.metadata(request_ids, starts, lengths)
        self._slots[found] = tuple(request_ids), tuple(starts), tuple(lengths)
        return found

    def slots_of(self, metadata: KVMetadata) -> Slots | KVMetadata:
        """What tells the other ranks the slots of a forward pass: the call that made the metadata, since their block
        tables are their own. Metadata that was made otherwise is returned as it is."""
        return self._slots.get(metadata, metadata)

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        with self._ranks.undivided():
            self._kv.compact(request_ids, num_known, verdict)
            self._ranks.later("compact", tuple(request_ids), tuple(num_known), verdict)

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        with self._ranks.undivided():
            self._kv.fill(group, request_ids, num_tokens)
            self._ranks.later("fill", group, tuple(request_ids), tuple(num_tokens))

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        with self._ranks.undivided():
            self._kv.advance(requests, counts)
            self._ranks.later("advance", self._sent.news(requests), tuple(counts))

    def release(self, request_id: str) -> None:
        with self._ranks.undivided():
            self._kv.release(request_id)
            self._sent.forget(request_id)
            self._ranks.later("release", request_id)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks

    def check_integrity(self) -> None:
        self._kv.check_integrity()

    def digests(self, requests: Sequence[RequestView], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
        """The `digest` of each rank, this one's first: for the first lengths[i] slots of each request i."""
        slots = tuple(request.id for request in requests), (0,) * len(requests), tuple(lengths)
        others = self._ranks.ask("digest", slots)
        return [digest(self._kv, self._ranks.sent, slots, requests), *others]


class SharedModel(Model):
    """Rank 0's part of a model. The other ranks run its forward passes, too. It has no recurrent layers: models that
    have some are not split.

    owner: TARGET, or the name of the proposer whose draft model this is.
    """

    def __init__(self, source: ModelSource, ranks: Ranks, owner: str = TARGET) -> None:
        self._ranks, self._owner = ranks, owner
        self._kv: SharedKV
        with ranks.together("load", owner, source):
            super().__init__(source, ranks.part)

    def attach(
        self,
        attention: PagedAttention,
        ops: Mapping[str, Callable[..., Any]],
        plan: Plan | None = None,
        states: StateStore | None = None,
    ) -> None:
        plan = plan or Plan()
        self._kv = attention.kv  # type: ignore[assignment]
        places, padding = attention.places, attention.padding
        with self._ranks.together("attach", self._owner, places, padding, Plan(output_rows=plan.output_rows)):
            super().attach(attention, ops, plan, states)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: KVMetadata,
        visibility: Visibility,
        rows: torch.Tensor,
        *,
        window: int | None = None,
        states: StatePlan | None = None,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        slots = self._kv.slots_of(metadata)
        with self._ranks.together("forward", self._owner, token_ids, positions, slots, visibility, rows, window):
            return super().forward(token_ids, positions, metadata, visibility, rows, window=window, states=states)

    def output_head(self, hidden: torch.Tensor, raw: bool = False) -> torch.Tensor:
        with self._ranks.together("output_head", self._owner, hidden, raw):
            return super().output_head(hidden, raw)

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._output_rows is None:
            return super().output_rows(token_ids)  # which raises
        with self._ranks.together("output_rows", self._owner, token_ids):
            return super().output_rows(token_ids)
