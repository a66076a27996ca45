"""The states of recurrent layers: a slot for each request, beside the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.contracts.kv import StateLayout
from specdec_core.errors import CapacityError
from specdec_core.ops.upload import upload


class StateStore:
    """Stores the states of up to num_slots requests. A slot's states are meaningless until they are cleared.

    Attributes: layers, for each recurrent layer its states by name, [num_slots, ...] each.
    """

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.layers = tuple(
            {each.name: torch.zeros(num_slots, *each.shape, dtype=each.dtype, device=device) for each in tensors}
            for tensors in layout.layers
        )
        self._num_slots, self._device = num_slots, device
        self._slots: dict[str, int] = {}  # by request; all others are free

    def add(self, request_id: str) -> None:
        """Give a request a slot. Raises CapacityError if all are taken."""
        taken = set(self._slots.values())
        free = next((slot for slot in range(self._num_slots) if slot not in taken), None)
        if free is None:
            raise CapacityError(
                f"request {request_id!r} needs a slot for its recurrent states, and all {self._num_slots} are taken: "
                f"run fewer requests at once, or raise max_num_seqs"
            )
        self._slots[request_id] = free

    def remove(self, request_id: str) -> None:
        """Free a request's slot. Unknown ids are ignored."""
        self._slots.pop(request_id, None)

    def slots_of(self, request_ids: Sequence[str]) -> list[int]:
        return [self._slots[request_id] for request_id in request_ids]

    def clear(self, slots: Sequence[int]) -> None:
        """Set the states in these slots to those before a request's first token."""
        if not slots:
            return
        cleared = upload(slots, self._device)
        for states in self.layers:
            for tensor in states.values():
                tensor.index_fill_(0, cleared, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError if two requests share a slot."""
        assert len(set(self._slots.values())) == len(self._slots), f"a slot is held twice: {self._slots}"
