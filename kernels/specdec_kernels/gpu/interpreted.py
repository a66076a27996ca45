"""What Triton's interpreter (TRITON_INTERPRET=1, for tests without a GPU) does otherwise than a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
AS_WRITTEN = {"enable_fp_fusion": False}
"""Launch options: each operation is rounded. Where the compiler makes one of two may differ between kernels."""

if triton.knobs.runtime.interpret:
    from triton.runtime import interpreter

    def _patch_lang_tensor(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
        """As a bound of a loop, Triton 3.6 gives Python an array that contains the number, which numpy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor


@triton.jit
def round_to(numbers, dtype: tl.constexpr):
    """float32 numbers, rounded to the nearest of another dtype. The interpreter would cut bits off."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def product(a, b, added):
    """The matrix product of a and b, plus `added`, summed in float32. The interpreter would multiply the bits of
    bfloat16 numbers as integers, and sum rows in an order that depends on their place. In float64 no order shows."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32) + added
    return tl.dot(a, b, added, input_precision="ieee")
