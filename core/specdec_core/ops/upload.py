"""Copies values from the host to a device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec_core.contracts.draft import on_device
from specdec_core.errors import SpecdecError


def upload(
    values: np.ndarray | torch.Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return values that are on the host as a tensor on a device.

    A plain copy to a GPU, as of `torch.tensor(values, device=device)` or `tensor.to(device)`, makes the host wait for
    all that the GPU has still to do. This one goes through pinned memory, so that it is only another piece of the GPU's
    work. On a CPU, nothing is copied unless the dtype differs: do not write to an array or tensor afterwards.

    dtype: of the result; None: that of the values; in a sequence, int64 for whole numbers and float32 for others.

    Raises SpecdecError while a CUDA graph is captured: it would repeat the copy, with these values.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise SpecdecError(
            "values were copied from the host while a CUDA graph was captured, which would repeat them for other "
            "calls: give them to the function as tensors, or compute them outside of it"
        )
    if isinstance(values, torch.Tensor):
        tensor = values
    elif isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    else:  # torch.as_tensor takes three times as long, and each step with a draft uploads three short sequences
        array = np.array(values)
        tensor = torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else on_device(tensor, device)


def upload_into(target: torch.Tensor, values: np.ndarray) -> None:
    """Copy values to a tensor of the same shape, as `upload`, in one launch."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.device.type == "cuda" else source, non_blocking=True)
