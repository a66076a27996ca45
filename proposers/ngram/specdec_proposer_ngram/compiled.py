"""What the index needs of numba beyond compiled loops: arrays at addresses, and memory asked for ahead of its use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WRITE, KEEP, DATA = (ir.Constant(ir.IntType(32), value) for value in (1, 3, 1))  # see llvm.prefetch


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at once, or load it from numba's cache where there is a folder for that."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no folder that it may write to
            return njit(signature, nogil=True)(function)

    return decorate


def inner(function: Callable[..., Any]) -> Any:
    """A function that only compiled ones call: it saves compiling a way in for Python."""
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


@inner
def array_at(address, size, dtype):
    """The array of size elements that lies at an address. Its owner must outlive it."""
    return carray(_pointer(address), size, dtype)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, i: Any) -> Any:
    """Have the processor fetch array[i] while it goes on: what is asked for together arrives together. Any i will do,
    even one outside of the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(ask, [place, WRITE, KEEP, DATA])
        return context.get_dummy_value()

    return types.none(array, types.int64), generate
