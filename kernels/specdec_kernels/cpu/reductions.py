"""Reductions of arrays to one number, with vectors of LANES float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.lanes import (
    I32,
    INTS,
    LANES,
    array_data,
    load_floats,
    loader,
    multiply_add as multiply_add_lanes,
    spread,
    store_rounded,
    variable,
)


@intrinsic  # type: ignore[untyped-decorator]
def sum_and_store(typing_context, numbers, start, end, output, to):
    """Return the sum of the float32 numbers[start:end], and write them to `output` from index `to` on, rounded if it is
    bfloat16. end - start is a multiple of LANES. A vector of LANES partial sums is computed first, then its lanes are
    added up."""
    is_bfloat = output.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, output_data = (array_data(context, builder, signature, args, i) for i in (0, 3))
        total, index, to = variable(builder), args[1].type, builder.sub(args[4], args[1])
        with cgutils.for_range_slice(builder, args[1], args[2], index(LANES), index) as (i, _):
            lanes = load_floats(builder, data, i)
            builder.store(builder.fadd(builder.load(total), lanes), total)
            store_rounded(builder, lanes, output_data, builder.add(to, i), is_bfloat)
        return _combined(builder, builder.load(total), builder.fadd)

    return types.float32(numbers, types.intp, types.intp, output, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(typing_context, numbers, start, end):
    """Return the sum of the squares of numbers[start:end], float32 or bfloat16, in the order of `sum_and_store`."""
    load_lanes = loader(numbers)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, total = array_data(context, builder, signature, args, 0), variable(builder)
        step = args[1].type(LANES)
        with cgutils.for_range_slice(builder, args[1], args[2], step, args[1].type) as (i, _):
            lanes = load_lanes(builder, data, i)
            builder.store(multiply_add_lanes(builder, lanes, lanes, builder.load(total)), total)
        return _combined(builder, builder.load(total), builder.fadd)

    return types.float32(numbers, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def highest_of(typing_context, numbers, start, end, least):
    """Return the largest of `least` and the float32 numbers[start:end]; end - start is a multiple of LANES. NaN is
    ignored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, highest = array_data(context, builder, signature, args, 0), variable(builder, spread(builder, args[3]))

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        step = args[1].type(LANES)
        with cgutils.for_range_slice(builder, args[1], args[2], step, args[1].type) as (i, _):
            builder.store(larger(load_floats(builder, data, i), builder.load(highest)), highest)
        return _combined(builder, builder.load(highest), larger)

    return types.float32(numbers, types.intp, types.intp, types.float32), generate


def _combined(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector to one number: neighbors first, then neighboring pairs, and so on."""
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
