"""bfloat16 in code compiled by numba, which has no such type: a bfloat16 is the upper half of a float32, stored as
uint16. Arithmetic is in float32.

The conversions are written as LLVM instructions. Each takes only a few of them, and loops around them are vectorized.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LIKE = {torch.float32: np.empty(0, dtype=np.float32), torch.bfloat16: np.empty(0, dtype=np.uint16)}
"""An array of each type that the compiled operations take, for `array_at`."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def inner(**options: Any) -> Any:
    """Return a decorator that compiles a function with numba's njit for calls from other compiled functions only: it
    has no entry point for Python. options: options of njit."""
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor as a numpy array that shares its memory. A bfloat16 tensor becomes a uint16 array."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@njit
def array_at(address, shape, like):
    """Return the contiguous array at a memory address, with this shape and the dtype of `like`. Compiled code gets the
    addresses of tensors and not numpy arrays, since `data_ptr()` takes a tenth of the time of making a numpy view."""
    return carray(_pointer(address), shape, like.dtype)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def load(typing_context: Any, number: Any) -> Any:
    """Convert an element of a float32 array, or of a uint16 array that stores bfloat16, to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widened(builder, args[0]) if number == types.uint16 else args[0]

    return types.float32(number), generate


@intrinsic
def as_stored(typing_context: Any, array: Any, value: Any) -> Any:
    """Convert a float32 value to the dtype of the array's elements: float32, or bfloat16 stored as uint16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return narrowed(builder, args[1]) if array.dtype == types.uint16 else args[1]

    return array.dtype(array, types.float32), generate


def widened(builder: Any, bits: Any) -> Any:
    """Generate code that converts bfloat16 to float32: a number stored as i16, or a vector of them."""
    wide = _like(bits, _I32)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), repeated(wide, 16)), _like(bits, _F32))


def narrowed(builder: Any, numbers: Any) -> Any:
    """Generate code that rounds float32, a number or a vector of them, to the nearest bfloat16, ties to even, as torch
    does. NaN becomes the NaN that torch makes."""
    wide = _like(numbers, _I32)
    bits = builder.bitcast(numbers, wide)
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, repeated(wide, 0x7FFFFFFF)), repeated(wide, 0x7F800000))
    is_odd = builder.and_(builder.lshr(bits, repeated(wide, 16)), repeated(wide, 1))
    nearest = builder.lshr(builder.add(bits, builder.add(is_odd, repeated(wide, 0x7FFF))), repeated(wide, 16))
    return builder.trunc(builder.select(is_nan, repeated(wide, 0x7FC0), nearest), _like(numbers, _I16))


def repeated(kind: Any, number: float) -> Any:
    """Return a constant: the number, or a vector in which every element is the number."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _like(value: Any, element: Any) -> Any:
    """Return the type of as many elements as the value has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element
