"""The inner loop of linear layers: multiplies several input rows with panels of the weight matrix.

A panel, here called strip, holds the weights of LANES outputs, in the order in which the loop reads them: for each step
along the input, the weights of all LANES outputs side by side. In float32, a step is one input. In bfloat16, a step is
a pair of inputs, which an AVX512-BF16 instruction multiplies and adds at once.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec_kernels.cpu.tiles import LANES, array_data, call_once

MOST_ROWS, MOST_STRIPS = 6, 4
"""So many sums fit into vector registers beside a row's input and the weights."""

_FEATURES = binding.get_host_cpu_features()
DTYPES = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
"""The instructions that each dtype needs."""


def is_supported(dtype: torch.dtype) -> bool:
    return _FEATURES.get(DTYPES.get(dtype, ""), False)


class _BFloat(ir.types.Type):
    """LLVM's type bfloat (bfloat16), which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_I32 = ir.IntType(32)
_SUMS = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply(typing_context, weight, strip, rows, row, sums, num_rows, num_strips):
    """Multiply num_rows input rows, from index `row` on, with num_strips strips, from index `strip` on. A strip is a
    panel of the weight matrix: the weights of LANES outputs.

    weight: all strips, [n, steps, LANES], or [n, steps, 2 * LANES] in bfloat16.
    rows: [n, in_features]. For an index past the end, the last row is used.
    sums: float32, flat; gets the result [num_rows, num_strips, LANES].
    num_rows, num_strips: literals, known when this is compiled.

    All arrays are contiguous. Each row is summed in the order of its inputs, independently of the other rows.
    """
    is_pairs = weight.dtype == types.uint16

    def body(builder: Any, weight_data: Any, num_steps: Any, strip: Any, *args: Any) -> None:
        rows_data, last_row, row, sums_data = args
        index = num_steps.type
        strip_len = builder.mul(num_steps, index(2 * LANES if is_pairs else LANES))
        row_len = builder.mul(num_steps, index(2)) if is_pairs else num_steps
        strips = [
            builder.gep(weight_data, [builder.mul(builder.add(strip, index(s)), strip_len)])
            for s in range(num_strips.literal_value)
        ]
        inputs = []
        for i in range(num_rows.literal_value):
            place = builder.add(row, index(i))
            place = builder.select(builder.icmp_signed("<", place, last_row), place, last_row)
            inputs.append(builder.gep(rows_data, [builder.mul(place, row_len)]))
        totals = [[_zero(builder) for _ in strips] for _ in inputs]
        with cgutils.for_range(builder, num_steps) as loop:
            factors = [_weights(builder, each, loop.index, is_pairs) for each in strips]
            for each, row_totals in zip(inputs, totals, strict=True):
                spread = _spread(builder, each, loop.index, is_pairs)
                for factor, total in zip(factors, row_totals, strict=True):
                    builder.store(_multiply_add(builder, spread, factor, builder.load(total), is_pairs), total)
        for i, total in enumerate(each for row_totals in totals for each in row_totals):
            place = builder.bitcast(builder.gep(sums_data, [index(i * LANES)]), _SUMS.as_pointer())
            builder.store(builder.load(total), place, align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight_data, rows_data, sums_data = (array_data(context, builder, signature, args, i) for i in (0, 2, 4))
        shapes = [context.make_array(signature.args[i])(context, builder, args[i]).shape for i in (0, 2)]
        num_steps, num_given = builder.extract_value(shapes[0], 1), builder.extract_value(shapes[1], 0)
        last_row = builder.sub(num_given, num_given.type(1))
        name = f"multiply_{weight.dtype}_{num_rows.literal_value}_{num_strips.literal_value}"
        call_once(builder, name, body, weight_data, num_steps, args[1], rows_data, last_row, args[3], sums_data)
        return context.get_dummy_value()

    return types.void(weight, types.intp, rows, types.intp, sums, num_rows, num_strips), generate


def _zero(builder: Any) -> Any:
    zero = ir.Constant(_SUMS, [0.0] * LANES)
    variable = cgutils.alloca_once_value(builder, zero)
    builder.store(zero, variable)
    return variable


def _weights(builder: Any, strip: Any, step: Any, is_pairs: bool) -> Any:
    kind, width = (_PAIRS, 2 * LANES) if is_pairs else (_SUMS, LANES)
    place = builder.gep(strip, [builder.mul(step, step.type(width))])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=4)


def _spread(builder: Any, inputs: Any, step: Any, is_pairs: bool) -> Any:
    """Load the input of a step (in bfloat16, a pair of inputs) and broadcast it to all lanes of a vector."""
    place = builder.gep(inputs, [builder.mul(step, step.type(2 if is_pairs else 1))])
    number = builder.load(builder.bitcast(place, (_I32 if is_pairs else ir.FloatType()).as_pointer()), align=2)
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    spread = builder.shuffle_vector(builder.insert_element(undefined, number, _I32(0)), undefined, lanes)
    return builder.bitcast(spread, _PAIRS) if is_pairs else spread


def _multiply_add(builder: Any, a: Any, b: Any, total: Any, is_pairs: bool) -> Any:
    name, args = ("llvm.fma.v16f32", [a, b, total])
    if is_pairs:
        name, args = ("llvm.x86.avx512bf16.dpbf16ps.512", [total, a, b])
    kind = ir.FunctionType(_SUMS, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)
