"""A pretend CUDA device for tests without a GPU: its tensors report device "cuda" but have their data on the CPU.

It raises where a real device does: for host and device tensors in one operation, for a device tensor as an index into a
host tensor, and for conversion to numpy without a copy to the host. And it counts where the host would wait for the
device: where a value is read back, where the shape of a result depends on values, and where memory that is not pinned
is copied. It handles torch functions that are called in the `with` block of PretendCuda.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from os import environ
from pathlib import Path
from typing import Any, Self
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

from specdec_testing.pretend_graphs import PretendGraphs

CUDA = torch.device("cuda", 0)
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
PLAIN = (torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
MAKING = (torch.tensor, torch.as_tensor)
SHAPING = ["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose"]
NUMBERS = ["__bool__", "__int__", "__float__", "__index__", "__contains__"]
READING = {
    *(getattr(torch, name) for name in [*SHAPING, "is_nonzero"]),
    *(getattr(torch.Tensor, name) for name in [*SHAPING, *NUMBERS, "cpu", "item", "tolist"]),
}
"""Functions that need a tensor's values on the host, to return them or for the shape of their results."""


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
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} went past the pretend device")


class PretendCuda(TorchFunctionMode):
    """A context manager in which tensor factories with device="cuda", `.to` and `.cuda` make tensors on the pretend
    device, and torch.cuda says that there is one. Models can be moved to it, in float32.

    Attributes: uploads, the number of elements of each tensor that was copied from the host. waits, the places at which
    the host would have waited for the device, in order, such as "nonzero at builder.py:76". graphs, the CUDA graphs.

    A copy to pinned memory that is queued (non_blocking) has no values before the host waits for the device, as if the
    device worked only then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[int] = []
        self.waits: list[str] = []
        self.graphs = PretendGraphs(run)
        self._pinned: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies to pinned memory, and their values
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        found = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "mem_get_info": lambda device=None: (2**33, 2**34),
            "get_device_capability": lambda device=None: (9, 0),
            "device": lambda device=None: nullcontext(),
            "Stream": lambda device=None: None,
            "current_stream": lambda device=None: None,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": self.graphs.make,
            "graph": self.graphs.capture,
            "graph_pool_handle": lambda: (0, 1),
            "is_current_stream_capturing": lambda: self.graphs.recording is not None,
            "synchronize": lambda device=None: self._wait(f"synchronize{_place()}"),
            "Event": lambda: PretendEvent(self._queued),
        }
        for name, value in found.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, value))
        # A mode of torch functions is one thread's, and transformers would read files in others.
        self._patches.enter_context(mock.patch.dict(environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        # A module's parameters become other objects when it is moved.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.pin_memory:
            pinned: torch.Tensor = _plainly(torch.Tensor.clone, args, {})
            self._pinned[id(pinned)] = pinned
            return pinned
        if function is torch.Tensor.copy_ and self._is_queued_copy(args, kwargs):
            self.graphs.record((function, args, kwargs, args[0]), None)
            self._queued.append((args[0], args[1].data_on_cpu.clone()))
            return args[0]
        result = run(function, args, kwargs)
        wait = f"{function.__name__}{_place()}" if self._waits(function, args, kwargs, result) else None
        self.graphs.record((function, args, kwargs, result), wait)
        if wait is not None:
            self._wait(wait)
        is_copy = function in MAKING or (function is torch.Tensor.to and not isinstance(args[0], OnCuda))
        if is_copy and isinstance(result, OnCuda):
            self.uploads.append(result.numel())
        return result

    def _wait(self, what: str) -> None:
        self.waits.append(what)
        while self._queued:
            target, values = self._queued.pop(0)
            with torch.inference_mode():
                _plainly(torch.Tensor.copy_, (target, values), {})

    def _is_queued_copy(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call of `copy_` goes from the device to pinned memory, and the host need not wait for it."""
        is_queued = kwargs.get("non_blocking") or any(each is True for each in args[2:])
        return bool(is_queued) and isinstance(args[1], OnCuda) and id(args[0]) in self._pinned

    def _waits(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a call makes the host wait for the device."""
        is_there = [isinstance(leaf, OnCuda) for leaf in tree_leaves((args, kwargs))]
        if function in MAKING:
            return isinstance(result, OnCuda) and not any(is_there)
        if function in (torch.Tensor.to, torch.Tensor.copy_):
            source = args[0] if function is torch.Tensor.to else args[1]
            target = result if function is torch.Tensor.to else args[0]
            if isinstance(source, OnCuda) == isinstance(target, OnCuda) or not source.numel():
                return False
            is_queued = kwargs.get("non_blocking") or any(each is True for each in args[1:])
            return isinstance(source, OnCuda) or id(source) not in self._pinned or not is_queued
        if function is torch.Tensor.cuda:
            return not any(is_there)
        if not any(is_there):
            return False
        if function in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index)
            fills = function is torch.Tensor.__setitem__ and not (isinstance(args[2], torch.Tensor) and args[2].dim())
            is_read = any(isinstance(each, OnCuda) and not each.dim() for each in index)
            is_copied = any(isinstance(each, list) or _is_on_host(each) for each in index)
            return (masks and not fills) or is_read or is_copied
        if function in (torch.Tensor.repeat_interleave, torch.repeat_interleave):
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            return isinstance(repeats, OnCuda) and kwargs.get("output_size") is None
        return function in READING or (function is torch.where and len(args) == 1)


class PretendEvent:
    """Takes the place of torch.cuda.Event. queued: the copies that the device has still to do."""

    def __init__(self, queued: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._queued, self._before = queued, list[tuple[torch.Tensor, torch.Tensor]]()

    def record(self) -> None:
        self._before = list(self._queued)

    def query(self) -> bool:
        """Whether the device has done what was queued before `record`."""
        return not any(copy is queued for copy in self._before for queued in self._queued)


def _is_on_host(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and not isinstance(index, OnCuda) and index.dim() > 0


def _place() -> str:
    """The innermost place outside of torch and of this module."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path != Path(__file__) and "torch" not in path.parts:
            return f" at {path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def run(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch function on the CPU. Wraps in OnCuda the result tensors that torch would put on a CUDA device."""
    if function in PLAIN or function in get_default_nowrap_functions():
        return _plainly(function, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, OnCuda)]
    devices = [torch.device(leaf).type for leaf in leaves if _is_device(leaf)]  # where to, if it says so
    if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
        devices = [args[1].device.type]
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
        return "cpu" if torch.device(leaf).type == "cuda" else leaf
    return leaf.data_on_cpu if isinstance(leaf, OnCuda) else leaf


def _plainly(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)
