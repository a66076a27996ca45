"""The exponential function in float32, of a number or of the lanes of a vector. Both have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.bits import repeated
from specdec_kernels.cpu.lanes import FLOATS, I32, INTS, LANES, array_data, lanes_at, load_floats, multiply_add, spread

LARGEST = 87.0
"""exp of this and of its negative are normal float32. Numbers beyond count as these; NaN stays."""
_DEGREE = 7
_AT_ONCE = 4
"""So many vectors are computed side by side, since each instruction waits for the one before."""


def exponential(builder: Any, x: Any) -> Any:
    """Generate exp(x), with a relative error below 3e-7. It is computed as 2**n times a Taylor polynomial on
    [-ln 2 / 2, ln 2 / 2]. All roundings are explicit."""
    kinds = (FLOATS, INTS) if x.type == FLOATS else (ir.FloatType(), I32)

    def number(value: float) -> Any:
        return repeated(kinds[0], float(np.float32(value)))

    def integer(value: int) -> Any:
        return repeated(kinds[1], value)

    x = builder.select(builder.fcmp_ordered("<", x, number(-LARGEST)), number(-LARGEST), x)
    x = builder.select(builder.fcmp_ordered(">", x, number(LARGEST)), number(LARGEST), x)
    shifted = builder.fadd(builder.fmul(x, number(1 / np.log(2))), number(127.5))
    exponent = builder.fptosi(shifted, kinds[1])  # n + 127, where n is the nearest: conversion rounds towards 0
    n = builder.sitofp(builder.sub(exponent, integer(127)), kinds[0])
    r = multiply_add(builder, n, number(-0.693359375), x)  # ln 2 in two parts, of which the first is exact
    r = multiply_add(builder, n, number(2.12194440e-4), r)
    p = number(1 / factorial(_DEGREE))
    for power in reversed(range(_DEGREE)):
        p = multiply_add(builder, p, r, number(1 / factorial(power)))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, integer(23)), kinds[0]))


@intrinsic  # type: ignore[untyped-decorator]
def exp(typing_context, x):
    """Return exp(x), float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return exponential(builder, args[0])

    return types.float32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def exp_of_differences(typing_context, numbers, start, end, subtracted):
    """Replace the float32 numbers[start:end] by exp(number - subtracted). end - start is a multiple of LANES."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, lanes = array_data(context, builder, signature, args, 0), spread(builder, args[3])

        def replace(i: Any, num_vectors: int) -> None:
            places = [builder.add(i, i.type(v * LANES)) for v in range(num_vectors)]
            found = [builder.fsub(load_floats(builder, data, place), lanes) for place in places]
            for place, each in zip(places, [exponential(builder, each) for each in found], strict=True):
                builder.store(each, lanes_at(builder, data, place), align=4)

        _in_vectors(builder, args[1], args[2], replace)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, types.float32), generate


def _in_vectors(builder: Any, start: Any, end: Any, body: Callable[[Any, int], None]) -> None:
    """Generate `body` for the vectors from start to end - 1, _AT_ONCE at a time and then one at a time."""
    for num_vectors in (_AT_ONCE, 1):
        step = start.type(num_vectors * LANES)
        past = builder.add(start, builder.mul(builder.sdiv(builder.sub(end, start), step), step))
        with cgutils.for_range_slice(builder, start, past, step, start.type) as (i, _):
            body(i, num_vectors)
        start = past
