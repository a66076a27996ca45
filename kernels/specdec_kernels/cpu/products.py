"""The inner loop of linear layers: multiplies several input rows with panels of the weight matrix.

A panel, here called strip, holds the weights of LANES outputs, in the order in which the loop reads them: for each step
along the input, the weights of all LANES outputs side by side. In float32, a step is one input. In bfloat16, a step is
a pair of inputs, which an AVX512-BF16 instruction multiplies and adds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.bits import widened
from specdec_kernels.cpu.calls import call_once
from specdec_kernels.cpu.lanes import (
    FLOATS,
    HALVES,
    I32,
    LANES,
    REGISTER,
    array_data,
    call,
    load_floats,
    narrowed,
    spread,
    spread_step,
    step_of,
    variable,
)

MOST_ROWS, MOST_STRIPS = 6, 4 if REGISTER == LANES else 1
"""So many sums fit into vector registers beside a row's input and the weights."""


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply(
    typing_context, weight, strip, rows, row, biases, output, to_row, to_column, is_added, num_rows, num_strips
):
    """Multiply num_rows input rows, from index `row` on, with num_strips strips, from index `strip` on, and add the
    biases. Write the results to `output`, from row to_row and column to_column on. Leaves out rows past the last of
    `rows`, and columns past the last of `output`.

    weight: all strips, [n, steps, LANES], or [n, steps, 2 * LANES] in bfloat16.
    rows: [n, in_features].
    biases: float32 [n * LANES], of all strips.
    output: [n, width], of the dtype of the rows.
    is_added: whether the results, rounded to the dtype, are added to what `output` has.
    num_rows, num_strips: literals, known when this is compiled.

    All arrays are contiguous. Each row is summed in the order of its inputs, independently of the other rows.
    """
    step = step_of(weight)

    def body(builder: Any, weight_data: Any, num_steps: Any, strip: Any, *args: Any) -> None:
        rows_data, last_row, row, biases_data, output_data, width, to_row, to_column, is_added = args
        index = num_steps.type
        row_len = builder.mul(num_steps, index(step.size))
        strip_len = builder.mul(row_len, index(LANES))
        strips = [
            builder.gep(weight_data, [builder.mul(builder.add(strip, index(s)), strip_len)])
            for s in range(num_strips.literal_value)
        ]
        places = [builder.add(row, index(i)) for i in range(num_rows.literal_value)]
        is_row = [builder.icmp_signed("<=", place, last_row) for place in places]
        inputs = [
            builder.gep(rows_data, [builder.mul(builder.select(given, place, last_row), row_len)])
            for given, place in zip(is_row, places, strict=True)
        ]
        totals = [[variable(builder) for _ in strips] for _ in inputs]
        with cgutils.for_range_slice(builder, index(0), row_len, index(step.size), index) as (i, _):
            factors = [step.load(builder, each, builder.mul(i, index(LANES))) for each in strips]
            for each, row_totals in zip(inputs, totals, strict=True):
                given = spread_step(builder, each, i, step)
                for factor, total in zip(factors, row_totals, strict=True):
                    builder.store(step.add_product(builder, given, factor, builder.load(total)), total)
        first_bias = builder.mul(strip, index(LANES))
        for s in range(len(strips)):
            column = builder.add(to_column, index(s * LANES))
            bias = load_floats(builder, biases_data, builder.add(first_bias, index(s * LANES)))

            def store_rows(mask: Any, s: int = s, column: Any = column, bias: Any = bias) -> None:
                for i, row_totals in enumerate(totals):
                    with builder.if_then(is_row[i]):
                        place = builder.add(builder.mul(builder.add(to_row, index(i)), width), column)
                        result = builder.fadd(builder.load(row_totals[s]), bias)
                        store(builder, result, is_added, mask, builder.gep(output_data, [place]), step.size == 2)

            for_columns(builder, column, width, store_rows)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight_data, rows_data, biases_data, output_data = (
            array_data(context, builder, signature, args, i) for i in (0, 2, 4, 5)
        )
        shapes = [context.make_array(signature.args[i])(context, builder, args[i]).shape for i in (0, 2, 5)]
        num_steps, num_given, width = (
            builder.extract_value(each, i) for each, i in zip(shapes, (1, 0, 1), strict=True)
        )
        last_row = builder.sub(num_given, num_given.type(1))
        name = f"multiply_{weight.dtype}_{num_rows.literal_value}_{num_strips.literal_value}"
        where = biases_data, output_data, width, *args[6:9]
        call_once(builder, name, body, weight_data, num_steps, args[1], rows_data, last_row, args[3], *where)
        return context.get_dummy_value()

    places = types.intp, types.intp, types.boolean
    kinds = weight, types.intp, rows, types.intp, biases, output, *places, num_rows, num_strips
    return types.void(*kinds), generate


def for_columns(builder: Any, column: Any, width: Any, store_rows: Callable[[Any], None]) -> None:
    """Generate `store_rows` for LANES columns from `column` on: with None where there are as many, and with a mask of
    those that are there where the width ends before."""
    left = builder.sub(width, column)
    with builder.if_else(builder.icmp_signed("<", left, left.type(LANES))) as (is_cut, is_whole):
        with is_cut:
            numbers = ir.Constant(ir.VectorType(left.type, LANES), list(range(LANES)))
            store_rows(builder.icmp_signed("<", numbers, spread(builder, left)))
        with is_whole:  # masks are slow without AVX-512
            store_rows(None)


def store(builder: Any, result: Any, is_added: Any, mask: Any, data: Any, is_bfloat: bool) -> None:
    """Round LANES results to the dtype and store those in the mask; None: all. If is_added, add them to what is there
    first."""
    kind, name = (HALVES, "v16i16.p0v16i16") if is_bfloat else (FLOATS, "v16f32.p0v16f32")
    data, align = builder.bitcast(data, kind.as_pointer()), 2 if is_bfloat else 4
    rounded = narrowed(builder, result) if is_bfloat else result
    if mask is None:
        before = builder.load(data, align=align)
    else:
        undefined = ir.Constant(kind, ir.Undefined)
        before = call(builder, f"llvm.masked.load.{name}", kind, data, I32(align), mask, undefined)
    if is_bfloat:
        sums = narrowed(builder, builder.fadd(widened(builder, before), widened(builder, rounded)))
    else:
        sums = builder.fadd(before, rounded)
    sums = builder.select(is_added, sums, rounded)
    if mask is None:
        builder.store(sums, data, align=align)
    else:
        call(builder, f"llvm.masked.store.{name}", ir.VoidType(), sums, data, I32(align), mask)
