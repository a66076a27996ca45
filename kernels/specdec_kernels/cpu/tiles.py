"""The two inner loops of attention, over tiles of TILE keys, written for vectors of LANES float32.

numba would vectorise neither as it should be: a dot product per key ends in a sum across lanes, which costs more than
the products. `dot_tile` sums LANES keys at once, in a tree of shuffles.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
TILE = 16

_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def array_data(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    """Pointer to the numbers of the i-th argument, an array."""
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def _vector_at(builder: Any, data: Any, index: Any) -> Any:
    """Pointer to the LANES numbers from data[index] on."""
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once, always: were it left to the compiler, two callers might get different bits."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


@intrinsic
def dot_tile(typing_context, query, query_start, tile, scores, scores_start):
    """scores[scores_start + j] = query[query_start:] . tile[j] for the TILE keys of a tile.

    query and scores float32 [...], tile float32 [TILE, width], all contiguous; width a multiple of LANES.
    """

    def generate(context, builder, signature, args):
        query_data, tile_data, scores_data = (array_data(context, builder, signature, args, i) for i in (0, 2, 3))
        width = builder.extract_value(context.make_array(signature.args[2])(context, builder, args[2]).shape, 1)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(TILE)]
        for each in sums:
            builder.store(zero, each)
        step = ir.Constant(width.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(width.type, 0), width, step, width.type) as (d, _):
            q = builder.load(_vector_at(builder, query_data, builder.add(args[1], d)), align=4)
            for j, each in enumerate(sums):
                offset = builder.add(builder.mul(width, ir.Constant(width.type, j)), d)
                k = builder.load(_vector_at(builder, tile_data, offset), align=4)
                builder.store(_multiply_add(builder, q, k, builder.load(each)), each)
        builder.store(
            _sum_lanes(builder, [builder.load(each) for each in sums]),
            _vector_at(builder, scores_data, args[4]),
            align=4,
        )
        return context.get_dummy_value()

    return types.void(query, types.intp, tile, scores, types.intp), generate


def _sum_lanes(builder: Any, vectors: list[Any]) -> Any:
    """[LANES vectors] -> one vector whose lane j is the sum over vector j's lanes.

    Each round adds neighbours: of two vectors, the even and the odd lanes make one vector of half-summed lanes.
    """
    even = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(0, 2 * LANES, 2)))
    odd = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(1, 2 * LANES, 2)))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)) for a, b in pairs
        ]
    return vectors[0]


@intrinsic
def add_tile(typing_context, weights, weights_start, tile, output, output_start):
    """output[output_start:] += sum over j of weights[weights_start + j] * tile[j], for the TILE values of a tile.

    weights and output float32 [...], tile float32 [TILE, width], all contiguous; width a multiple of LANES.
    """

    def generate(context, builder, signature, args):
        weights_data = array_data(context, builder, signature, args, 0)
        tile_data = array_data(context, builder, signature, args, 2)
        output_data = array_data(context, builder, signature, args, 3)
        width = builder.extract_value(context.make_array(signature.args[2])(context, builder, args[2]).shape, 1)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = ir.Constant(ir.IntType(32), 0)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        spread = []
        for j in range(TILE):
            weight = builder.load(builder.gep(weights_data, [builder.add(args[1], ir.Constant(args[1].type, j))]))
            spread.append(
                builder.shuffle_vector(builder.insert_element(undefined, weight, first), undefined, everywhere)
            )
        step = ir.Constant(width.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(width.type, 0), width, step, width.type) as (d, _):
            place = _vector_at(builder, output_data, builder.add(args[4], d))
            total = builder.load(place, align=4)
            for j, weight in enumerate(spread):
                offset = builder.add(builder.mul(width, ir.Constant(width.type, j)), d)
                total = _multiply_add(
                    builder, weight, builder.load(_vector_at(builder, tile_data, offset), align=4), total
                )
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(weights, types.intp, tile, output, types.intp), generate
