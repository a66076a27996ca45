"""The block tables of a pool on a device."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core.kv.block_pool import BlockPool
from specdec_core.ops.upload import upload


class DeviceTables:
    """A copy of a pool's block tables on a device, to which only changed entries are uploaded. A CPU needs no copy."""

    def __init__(self, pool: BlockPool, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._copied: np.ndarray | None = None  # the array that `_copy` is a copy of
        self._copy = torch.empty(0)  # int64 [num_rows, max_blocks]
        self._last: tuple[np.ndarray, torch.Tensor] | None = None  # rows on the host and on the device

    def of(self, request_ids: list[str]) -> torch.Tensor:
        """Return `BlockPool.tables` on the device. It is valid until a request's blocks change."""
        tables = self._pool.tables(request_ids)
        if self._device.type == "cpu":
            return torch.from_numpy(tables)
        if self._last is None or self._last[0] is not tables:
            self._update()
            rows = self._pool.rows.indices(request_ids)
            at = rows if isinstance(rows, slice) else upload(rows, self._device)
            self._last = tables, self._copy[at]
        return self._last[1]

    def _update(self) -> None:
        array, written = self._pool.rows.array(), self._pool.rows.take_written()
        if array is not self._copied:
            self._copied, self._copy = array, upload(array, self._device)
        elif len(written):
            index, blocks = upload(np.stack([written, array.ravel()[written]]), self._device)
            self._copy.view(-1).index_copy_(0, index, blocks)
