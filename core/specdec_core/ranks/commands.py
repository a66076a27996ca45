"""The commands that ranks other than 0 run: each is a method of `Commands`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from specdec_core import ops
from specdec_core.contracts.kv import KVContext, KVLayout, KVManager, KVMetadata, Visibility
from specdec_core.contracts.ops import OpsContext
from specdec_core.contracts.proposer import Plan
from specdec_core.contracts.verifier import Verdict
from specdec_core.models import Model
from specdec_core.models.attention import PagedAttention
from specdec_core.models.load import ModelSource
from specdec_core.models.split_modules import Part
from specdec_core.ops.padding import Padding
from specdec_core.plugins import Plugins
from specdec_core.plugins.discovery import Plugin
from specdec_core.plugins.loading import load_all
from specdec_core.ranks.digests import digest
from specdec_core.ranks.driver import device_of
from specdec_core.ranks.group import join
from specdec_core.ranks.messages import Sum
from specdec_core.ranks.requests import News, RequestCopy, Slots


class Commands:
    """What a rank other than 0 has: its part of models and of the KV cache. Methods that rank 0 asks return an answer.

    received: a checksum of all messages.
    """

    def __init__(self, rank: int, size: int, received: Sum) -> None:
        self._rank, self._size, self._received = rank, size, received
        self._models: dict[str, Model] = {}
        self._requests: dict[str, RequestCopy] = {}
        self._device: torch.device
        self._plugins: Plugins
        self._part: Part
        self._kv: KVManager

    def ask(self, name: str, *args: Any) -> Any:
        """Run a command whose result rank 0 waits for."""
        return getattr(self, name)(*args)

    def prepare(self, device: torch.device, num_threads: int, plugins: Sequence[Plugin]) -> None:
        """device: rank 0's."""
        torch.set_num_threads(num_threads)
        self._device = device_of(self._rank, device, self._size)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        load_all(plugins)
        self._plugins = Plugins(plugins)

    def join(self, file: str) -> None:
        self._part = join(file, self._rank, self._size, self._device)

    def load(self, owner: str, source: ModelSource) -> None:
        self._models[owner] = Model(evolve(source, device=self._device), self._part)

    def weight_bytes(self, owner: str) -> int | None:
        return self._models[owner].weight_bytes

    def build_kv(self, name: str, options: Any, context: KVContext) -> None:
        layouts = self._models["target"].kv_groups.layouts
        compact = self._ops(layouts)["compact"]
        self._kv = self._plugins.kv_manager(name).build(options, evolve(context, device=self._device, compact=compact))

    def add_group(self, layout: KVLayout, owner: str, lookahead: int) -> None:
        self._kv.add_group(layout, owner, lookahead)

    def attach(self, owner: str, places: Sequence[tuple[int, int]], padding: Padding, plan: Plan) -> None:
        model = self._models[owner]
        found = self._ops(model.kv_groups.layouts)
        model.attach(PagedAttention(self._kv, places, found, padding), found, plan)

    def forward(
        self,
        owner: str,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: Slots | KVMetadata,
        visibility: Visibility,
        rows: torch.Tensor,
        window: int | None,
    ) -> None:
        metadata = self._kv.metadata(*slots) if isinstance(slots, tuple) else slots
        self._models[owner].forward(token_ids, positions, metadata, visibility, rows, window=window)

    def output_head(self, owner: str, hidden: torch.Tensor, raw: bool) -> None:
        self._models[owner].output_head(hidden, raw)

    def output_rows(self, owner: str, token_ids: torch.Tensor) -> None:
        self._models[owner].output_rows(token_ids)

    def admit(
        self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int], num_cached_tokens: int
    ) -> None:
        """num_cached_tokens: what rank 0's KV manager found. Raises RuntimeError if this one finds another number."""
        found = self._kv.admit(request_id, token_ids, salt, groups)
        if found != num_cached_tokens:
            raise RuntimeError(
                f"the KV manager found {found} cached tokens of {request_id}, and rank 0's {num_cached_tokens}: what "
                f"a manager does must follow from its calls alone"
            )

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        self._kv.reserve(request_id, num_tokens, num_scratch)

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        self._kv.compact(request_ids, num_known, verdict)

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        self._kv.fill(group, request_ids, num_tokens)

    def advance(self, news: Sequence[News], counts: Sequence[int]) -> None:
        for each in news:
            self._requests[each.id] = RequestCopy.updated(self._requests.get(each.id), each)
        self._kv.advance([self._requests[each.id] for each in news], counts)

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._kv.release(request_id)

    def digest(self, slots: Slots) -> tuple[Any, ...]:
        return digest(self._kv, self._received, slots, [self._requests.get(request_id) for request_id in slots[0]])

    def clear(self) -> None:
        """Forget the models and the KV cache, so that other ones can be loaded."""
        self._models.clear()
        self._requests.clear()
        vars(self).pop("_kv", None)

    def _ops(self, layouts: Sequence[KVLayout]) -> dict[str, Any]:
        contexts = [OpsContext(self._device, layout.dtype, layout) for layout in layouts]
        return ops.resolve(self._plugins.ops(self._device.type), contexts)
