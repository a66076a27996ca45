"""numba helpers for the n-gram index: inner functions, arrays at memory addresses, and prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WRITE, KEEP, DATA = (ir.Constant(ir.IntType(32), value) for value in (1, 3, 1))  # see llvm.prefetch


def jit_inner(function: Callable[..., Any]) -> Any:
    """Compile a function with numba that only other compiled functions call. Python code cannot call it."""
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


@jit_inner
def array_at(address, size, dtype):
    """Return an array of `size` elements that lies at a memory address. The memory must outlive the array."""
    return carray(_pointer(address), size, dtype)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, i: Any) -> Any:
    """Start to load array[i] into the CPU cache, without waiting for it. i may lie outside of the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(ask, [place, WRITE, KEEP, DATA])
        return context.get_dummy_value()

    return types.none(array, types.int64), generate
