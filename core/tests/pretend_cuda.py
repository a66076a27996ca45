"""A pretend CUDA device for tests without a GPU: its tensors report device "cuda" but have their data on the CPU.

It raises where a real device does: for host and device tensors in one operation, for a device tensor as an index into a
host tensor, and for conversion to numpy without a copy to the host. It handles torch functions that are called in the
`with` block of PretendCuda. A module's parameters cannot be moved to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class OnCuda(torch.Tensor):
    """A tensor on the pretend device. data: a CPU tensor with its values."""

    data_on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Self:
        tensor = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=CUDA)
        tensor.data_on_cpu = data
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCuda({self.data_on_cpu})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} went past the pretend device")


class PretendCuda(TorchFunctionMode):
    """A context manager in which tensor factories with device="cuda", `.to` and `.cuda` make tensors on the pretend
    device.

    Attributes: uploads, the number of elements of each tensor that was copied from the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run(function, args, kwargs or {})
        is_copy = function is torch.tensor or (function is torch.Tensor.to and not isinstance(args[0], OnCuda))
        if is_copy and isinstance(result, OnCuda):
            self.uploads.append(result.numel())
        return result


def run(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch function on the CPU. Wraps in OnCuda the result tensors that torch would put on a CUDA device."""
    if function is torch.device or function in get_default_nowrap_functions():
        return _plainly(function, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, OnCuda)]
    devices = [torch.device(leaf).type for leaf in leaves if _is_device(leaf)]  # where to, if it says so
    if there and not devices:
        _check(function, args, leaves)
    is_result_there = "cuda" in devices if devices else bool(there) and function is not torch.Tensor.cpu
    if function is torch.Tensor.cuda:
        function, is_result_there = torch.Tensor.clone, True
    if function is torch.Tensor.to and is_result_there and not isinstance(args[0], OnCuda):
        args = (args[0].clone(), *args[1:])  # a copy to a device shares no memory
    host_args, host_kwargs = (tree_map(_on_host, each) for each in (args, kwargs))
    result = _plainly(function, host_args, host_kwargs)
    if not is_result_there:
        return result
    known = {id(tensor.data_on_cpu): tensor for tensor in there}  # what works in place returns the same tensor

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else OnCuda(leaf)

    return tree_map(wrapped, result)


def _check(function: Callable[..., Any], args: Any, leaves: list[Any]) -> None:
    """Raise the error that CUDA raises if an operation mixes host and device tensors or converts a device tensor to
    numpy."""
    if function is torch.Tensor.numpy:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to the host first")
    if function in INDEXING:
        if not isinstance(args[0], OnCuda) and any(isinstance(leaf, OnCuda) for leaf in tree_leaves(args[1])):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        leaves = [args[0], *args[2:]]  # an index may be on the host
    on_host = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnCuda)]
    if function is not torch.Tensor.copy_ and any(tensor.dim() for tensor in on_host):  # one number may be on the host
        raise RuntimeError(f"Expected all tensors to be on the same device: {function} of cuda:0 and cpu")


def _is_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda"))


def _on_host(leaf: Any) -> Any:
    if _is_device(leaf):
        return "cpu"
    return leaf.data_on_cpu if isinstance(leaf, OnCuda) else leaf


def _plainly(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)
