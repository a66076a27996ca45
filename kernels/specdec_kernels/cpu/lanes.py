"""Vectors of LANES numbers, as LLVM instructions. Arithmetic is in float32; bfloat16 is stored as uint16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from attrs import frozen
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from specdec_kernels.cpu.bits import narrowed as nearest, repeated, widened

LANES = 16

NEEDED = {torch.float32: {"avx2", "fma"}, torch.bfloat16: {"avx512bf16"}}
"""The instructions that products of each dtype need."""


def is_supported(dtype: torch.dtype) -> bool:
    """Whether the processor that numba compiles for has the instructions."""
    return dtype in NEEDED and NEEDED[dtype] <= features()


@cache
def features() -> frozenset[str]:
    """The instructions of the processor that numba compiles for."""
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES, as +avx512f,-avx512bf16
        return frozenset(each[1:] for each in config.CPU_FEATURES.split(",") if each.startswith("+"))
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


REGISTER = LANES if "avx512f" in features() else LANES // 2
"""How many float32 a vector register holds. There are 32 such registers with AVX-512F, and 16 of half the size without:
there a vector takes two."""


class _BFloat(ir.types.Type):
    """LLVM's type bfloat (bfloat16), which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I32 = ir.IntType(32)
FLOATS, INTS, HALVES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), I32, ir.IntType(16)))
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
ZERO = repeated(FLOATS, 0.0)


def array_data(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    """Return an LLVM pointer to the elements of argument number i, which is an array."""
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def variable(builder: Any, value: Any = ZERO) -> Any:
    """Generate code that allocates a variable for a vector and stores `value` in the variable."""
    made = cgutils.alloca_once(builder, FLOATS)
    builder.store(value, made)
    return made


def lanes_at(builder: Any, data: Any, i: Any, kind: Any = FLOATS) -> Any:
    """Return a pointer to the vector that begins at data[i]."""
    return builder.bitcast(builder.gep(data, [i]), kind.as_pointer())


def load_floats(builder: Any, data: Any, i: Any) -> Any:
    return builder.load(lanes_at(builder, data, i), align=4)


def load_halves(builder: Any, data: Any, i: Any) -> Any:
    """Load LANES bfloat16 from data[i] on, as float32."""
    return widened(builder, builder.load(lanes_at(builder, data, i, HALVES), align=2))


def load_pairs(builder: Any, data: Any, i: Any) -> Any:
    """Load 2 * LANES bfloat16 from data[i] on, for `multiply_add_pairs`."""
    return builder.load(lanes_at(builder, data, i, PAIRS), align=2)


@frozen
class Step:
    """What one step of a sum of products takes of each factor in each lane: a float32, or a pair of bfloat16."""

    size: int  # numbers for each lane
    load: Callable[[Any, Any, Any], Any]  # for each lane, its own
    add_product: Callable[[Any, Any, Any, Any], Any]  # to the third argument


def step_of(array: Any) -> Step:
    """Return the step for factors in arrays of this type."""
    if array.dtype == types.uint16:
        return Step(2, load_pairs, multiply_add_pairs)
    return Step(1, load_floats, multiply_add)


def spread_step(builder: Any, data: Any, i: Any, step: Step) -> Any:
    """Load one step from data[i] on, and broadcast it to all lanes."""
    kind = I32 if step.size == 2 else ir.FloatType()
    number = builder.load(builder.bitcast(builder.gep(data, [i]), kind.as_pointer()), align=2)
    return builder.bitcast(spread(builder, number), PAIRS if step.size == 2 else FLOATS)


def interleaved(builder: Any, rows: Sequence[Any], i: Any, num_vectors: int, step: Step) -> list[Any]:
    """Load num_vectors * LANES elements from index i on of each row, as many rows as a step has numbers, and put those
    of a lane together."""
    if step.size == 1:
        return [load_floats(builder, rows[0], builder.add(i, i.type(v * LANES))) for v in range(num_vectors)]
    width = num_vectors * LANES
    whole = ir.VectorType(ir.IntType(16), width)
    first, second = (builder.load(lanes_at(builder, row, i, whole), align=2) for row in rows)
    order = [lane + row * width for lane in range(width) for row in range(2)]
    parts = [order[start : start + 2 * LANES] for start in range(0, 2 * width, 2 * LANES)]
    places = [ir.Constant(ir.VectorType(I32, 2 * LANES), part) for part in parts]
    return [builder.bitcast(builder.shuffle_vector(first, second, each), PAIRS) for each in places]


def loader(array: Any) -> Callable[[Any, Any, Any], Any]:
    """Return the function that loads LANES elements of an array of this type as float32."""
    return load_halves if array.dtype == types.uint16 else load_floats


def store_rounded(builder: Any, numbers: Any, data: Any, i: Any, is_bfloat: bool) -> None:
    """Store LANES float32 from data[i] on, rounded if the elements are bfloat16."""
    if is_bfloat:
        builder.store(narrowed(builder, numbers), lanes_at(builder, data, i, HALVES), align=2)
    else:
        builder.store(numbers, lanes_at(builder, data, i), align=4)


def rounded(builder: Any, numbers: Any, is_bfloat: bool) -> Any:
    """Round float32 to bfloat16 if is_bfloat."""
    return widened(builder, narrowed(builder, numbers)) if is_bfloat else numbers


def narrowed(builder: Any, numbers: Any) -> Any:
    """Round float32 to bfloat16 as `bits.as_stored` does, except that the instruction turns denormal numbers, below
    1.2e-38, into 0."""
    if is_supported(torch.bfloat16):
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.bitcast(call(builder, name, ir.VectorType(_BFloat(), LANES), numbers), HALVES)
    return nearest(builder, numbers)


def spread(builder: Any, number: Any) -> Any:
    """Broadcast a number to all lanes of a vector."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, I32(0)), undefined, repeated(INTS, 0))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Generate a * b + c, of vectors or numbers, with the instruction that rounds once. If the compiler decided whether
    to fuse the two operations, two callers might get different bits."""
    name = f"llvm.fma.v{LANES}f32" if a.type == FLOATS else "llvm.fma.f32"
    return call(builder, name, a.type, a, b, c)


def multiply_add_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Generate c + a[even] * b[even] + a[odd] * b[odd] in each lane, of pairs of bfloat16 and a float32 vector."""
    if is_supported(torch.bfloat16):
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, c, a, b)
    sixteen, upper = repeated(INTS, 16), repeated(INTS, 0xFFFF0000)
    a, b = builder.bitcast(a, INTS), builder.bitcast(b, INTS)
    for half in (lambda bits: builder.shl(bits, sixteen), lambda bits: builder.and_(bits, upper)):
        c = multiply_add(builder, *(builder.bitcast(half(bits), FLOATS) for bits in (a, b)), c)
    return c


def call(builder: Any, name: str, returned: Any, *args: Any) -> Any:
    """Generate a call of an LLVM intrinsic."""
    kind = ir.FunctionType(returned, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)
