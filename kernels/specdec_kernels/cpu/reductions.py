"""Reductions of arrays to one number, with vectors of LANES float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.lanes import (
    I32,
    INTS,
    LANES,
    ZERO,
    array_data,
    load_floats,
    loader,
    multiply_add as multiply_add_lanes,
    spread,
    store_rounded,
    variable,
)

_AT_ONCE = 4


@intrinsic  # type: ignore[untyped-decorator]
def sum_and_store(typing_context, numbers, start, end, output, to):
    """Return the sum of the float32 numbers[start:end], and write them to `output` from index `to` on, rounded if it is
    bfloat16. end - start is a multiple of LANES."""
    is_bfloat = output.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, output_data = (array_data(context, builder, signature, args, i) for i in (0, 3))
        to = builder.sub(args[4], args[1])

        def add(total: Any, i: Any) -> Any:
            lanes = load_floats(builder, data, i)
            store_rounded(builder, lanes, output_data, builder.add(to, i), is_bfloat)
            return builder.fadd(total, lanes)

        return _reduced(builder, *args[1:3], ZERO, add, builder.fadd)

    return types.float32(numbers, types.intp, types.intp, output, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(typing_context, numbers, start, end):
    """Return the sum of the squares of numbers[start:end], float32 or bfloat16, in the order of `sum_and_store`."""
    load_lanes = loader(numbers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature, args, 0)

        def add(total: Any, i: Any) -> Any:
            lanes = load_lanes(builder, data, i)
            return multiply_add_lanes(builder, lanes, lanes, total)

        return _reduced(builder, *args[1:3], ZERO, add, builder.fadd)

    return types.float32(numbers, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def highest_of(typing_context, numbers, start, end, least):
    """Return the largest of `least` and the float32 numbers[start:end]; end - start is a multiple of LANES. NaN is
    ignored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature, args, 0)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def take(highest: Any, i: Any) -> Any:
            return larger(load_floats(builder, data, i), highest)

        return _reduced(builder, *args[1:3], spread(builder, args[3]), take, larger)

    return types.float32(numbers, types.intp, types.intp, types.float32), generate


def _reduced(
    builder: Any,
    start: Any,
    end: Any,
    initial: Any,
    take: Callable[[Any, Any], Any],
    combine: Callable[[Any, Any], Any],
) -> Any:
    """Generate a reduction of the vectors from start to end - 1 to one number. Every _AT_ONCE-th vector goes into the
    same result, until fewer are left, which go into the first: an instruction need not wait for the one before. Then
    results are combined, and the lanes of what this gives, neighbors first.

    take: called with a result and the index of a vector, returns the result with this vector.
    """
    results = [variable(builder, initial) for _ in range(_AT_ONCE)]
    for number in (_AT_ONCE, 1):
        step = start.type(number * LANES)
        past = builder.add(start, builder.mul(builder.sdiv(builder.sub(end, start), step), step))
        with cgutils.for_range_slice(builder, start, past, step, start.type) as (i, _):
            for v, result in enumerate(results[:number]):
                builder.store(take(builder.load(result), builder.add(i, start.type(v * LANES))), result)
        start = past
    lanes = reduce(combine, map(builder.load, results))
    distance = 1
    while distance < LANES:
        others = ir.Constant(INTS, [i ^ distance for i in range(LANES)])
        lanes = combine(lanes, builder.shuffle_vector(lanes, lanes, others))
        distance *= 2
    return builder.extract_element(lanes, I32(0))


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context, a, b, c):
    """Return a * b + c of three float32, rounded only once (a fused multiply-add)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_add_lanes(builder, *args)

    return types.float32(*[types.float32] * 3), generate
