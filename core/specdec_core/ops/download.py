"""Copies values from a GPU to the host, without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import torch


class Download:
    """A tensor on its way to the host. value: on a GPU."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = torch.zeros(value.shape, dtype=value.dtype).pin_memory()
        self._host.copy_(value, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def get(self) -> torch.Tensor | None:
        """Return the tensor on the host; None if it has not arrived."""
        return self._host if self._event.query() else None
