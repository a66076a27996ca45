"""Decoder layers computed in one call: the loop over layers and their stages, compiled. Between two stages all threads
meet; each stage is cut into parts, one per thread.

A row's result has the same bits as from the single operations, and depends on no other row.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange, typeof, types

from specdec_core import compiled
from specdec_core.ops.decoder import NORMS, PRODUCTS
from specdec_kernels.cpu.activations import activate
from specdec_kernels.cpu.amx import release_tiles
from specdec_kernels.cpu.attend import address_of_attend
from specdec_kernels.cpu.bits import array_at, as_stored, inner, load
from specdec_kernels.cpu.calls import address_of, call_at
from specdec_kernels.cpu.lanes import LANES
from specdec_kernels.cpu.linear import MOST_AT_ONCE, multiply_some, product_part, strips_at_once
from specdec_kernels.cpu.norm import norm_row
from specdec_kernels.cpu.products import MOST_STRIPS
from specdec_kernels.cpu.rotary import rotate_row

PRODUCT = np.dtype(
    [(name, np.int64) for name in ("strips", "num_strips", "num_steps", "biases", "num_in", "num_out", "uses_amx")]
)
NORM = np.dtype([("weight", np.int64), ("width", np.int64), ("eps", np.float64), ("rounds_first", np.int64)])
"""weight: address of float32 [width]; a width of 0: no norm."""
LAYER = np.dtype(
    [(name, np.int64) for name in ("num_heads", "num_kv_heads", "head_dim", "rope", "activation", "window")]
    + [(name, np.int64) for name in ("num_slots", "keys", "key_stride", "values", "value_stride")]
    + [(name, np.int64) for name in ("sinks", "num_sinks", "copy", "attends_by_amx")]
    + [(name, np.float64) for name in ("scaling", "softcap")]
    + [(name, PRODUCT) for name in PRODUCTS]
    + [(name, NORM) for name in NORMS]
)
"""A layer's sizes and addresses. keys, values: those of its KV cache, each with the stride from row to row. copy: where
its input is written among the copies, counted from 1; 0: nowhere."""

NORM_INPUT, QUERY_KEY_VALUE, ROTATE_AND_STORE, ATTENTION, ATTENTION_OUTPUT = range(5)
NORM_BETWEEN, GATE_AND_UP, DOWN, NORM_OUTPUT, END = range(5, 10)
"""The stages of a layer, in order."""
_FLOATS, _INTS = np.empty(0, np.float32), np.empty(0, np.int64)


@compiled(parallel=True)
def run_stages(functions, num_parts, like, layers, stages, buffers, copies, tokens, ropes, paths):
    """Run some stages of each layer.

    functions: what `addresses_of` returns.
    like: an array with the dtype of all numbers.
    layers: array of LAYER.
    stages: the first stage, and the one past the last.
    buffers: addresses of hidden [n, width], which is changed in place, and of memory for inputs of products [n, inputs
        of `query_key_value`], query, key and value [n, columns of that product], attended [n, inputs of the next],
        gated [n, inputs of `down`] and an output that has to be normed [n, width]. Then the address of what the first
        layer's input of query, key and value begins with [n, what `width` leaves of that input].
    copies: address of the copies of layers' inputs, like [number, n or more, width], 0 if there are none; and the bytes
        of each copy.
    tokens: their number n, the width, and the addresses of their cache rows and of their rows in the tables of ropes,
        int64 [n] each. The second may be 0: token i has row i.
    ropes: of each rotary embedding the addresses of cos and sin [num_rows, head_dim], and num_rows, int64 [number, 3].
        For rows that are not there, the nearest one is taken.
    paths: the arrays chunks, paths and places of `lay_out`.

    Returns False, and runs nothing, if a layer's KV cache lacks one of the rows.
    """
    slots = array_at(tokens[2], (tokens[0],), _INTS)
    for layer in range(len(layers)):
        for slot in slots:
            if not -layers[layer]["num_slots"] <= slot < layers[layer]["num_slots"]:
                return False
    for layer in range(len(layers)):
        for stage in range(stages[0], stages[1]):
            for part in prange(num_parts):
                where = np.int64(stage), np.int64(part), num_parts, functions[1], layers[layer : layer + 1]
                call_at(functions[0], (*where, like, buffers, copies, tokens, ropes, *paths))
    return True


@cache
def addresses_of(dtype: np.dtype) -> tuple[int, int]:
    """Return the addresses of `_run_stage` and of `attend_part` for numbers of a dtype."""
    number, table, like = types.int64, types.int64[:, ::1], typeof(np.empty(0, dtype))
    layer = typeof(np.empty(0, LAYER))
    tuples = [types.UniTuple(number, length) for length in (7, 2, 4)]
    kinds = [number] * 4 + [layer, like, *tuples, table]
    return address_of(_run_stage, [*kinds, table, table, types.int64[::1]]), address_of_attend(dtype)


@compiled()
def _run_stage(stage, part, num_parts, attend, layers, like, buffers, copies, tokens, ropes, chunks, paths, places):
    layer = layers[0]
    num_tokens, width, slots, places_in_ropes = tokens
    hidden_at, normed_at, heads_at, attended_at, gated_at, output_at, entering_at = buffers
    hidden = array_at(hidden_at, (num_tokens, width), like)
    inputs = array_at(normed_at, (num_tokens, layer["query_key_value"]["num_in"]), like)
    normed = array_at(normed_at, (num_tokens, width), like)
    heads = array_at(heads_at, (num_tokens, layer["query_key_value"]["num_out"]), like)
    attended = array_at(attended_at, (num_tokens, layer["num_heads"] * layer["head_dim"]), like)
    gated = array_at(gated_at, (num_tokens, layer["gate_and_up"]["num_out"] // 2), like)
    output = array_at(output_at, (num_tokens, width), like)
    entering = array_at(entering_at, (num_tokens, inputs.shape[1] - width), like)
    rows = num_tokens * part // num_parts, num_tokens * (part + 1) // num_parts
    if stage == NORM_INPUT:
        if copies[0] != 0 and layer["copy"] != 0:
            copy = array_at(copies[0] + (layer["copy"] - 1) * copies[1], hidden.shape, like)
            for row in range(rows[0], rows[1]):
                for i in range(width):
                    copy[row, i] = hidden[row, i]
        _enter(layer["entering_norm"], entering, rows, inputs, 0)
        _enter(layer["input_norm"], hidden, rows, inputs, entering.shape[1])
    elif stage == QUERY_KEY_VALUE:
        _product(layer["query_key_value"], like, inputs, part, num_parts, False, heads)
    elif stage == ROTATE_AND_STORE:
        _rotate_and_store(layer, like, heads, rows, slots, ropes[layer["rope"]], places_in_ropes)
    elif stage == ATTENTION:
        _attend(attend, layer, part, num_parts, like, heads_at, attended_at, num_tokens, chunks, paths, places)
    elif stage == ATTENTION_OUTPUT:
        norm = layer["attention_norm"]
        _add_product(layer["attention_output"], norm, like, attended, part, num_parts, hidden, output)
    elif stage == NORM_BETWEEN:
        _add_normed(layer["attention_norm"], output, rows, hidden)
        _norm_rows(layer["mlp_norm"], hidden, rows, normed, 0)
    elif stage == GATE_AND_UP:
        _gate(layer["gate_and_up"], layer["activation"], like, normed, part, num_parts, gated)
    elif stage == DOWN:
        _add_product(layer["down"], layer["down_norm"], like, gated, part, num_parts, hidden, output)
    else:
        _add_normed(layer["down_norm"], output, rows, hidden)


@inner()
def _weight(norm):
    return array_at(norm["weight"], (norm["width"],), _FLOATS)


@inner()
def _enter(norm, given, rows, output, column):
    """Write rows to `output`, from a column on: normed, or as they are without a norm."""
    if norm["width"] > 0:
        _norm_rows(norm, given, rows, output, column)
    else:
        for row in range(rows[0], rows[1]):
            for i in range(given.shape[1]):
                output[row, column + i] = given[row, i]


@inner()
def _norm_rows(norm, given, rows, output, column):
    for row in range(rows[0], rows[1]):
        norm_row(given[row], 0, _weight(norm), norm["eps"], norm["rounds_first"], output[row], column)


@inner()
def _add_normed(norm, given, rows, hidden):
    """Norm the rows of `given` in place, and add them to `hidden`. Does nothing without a norm."""
    if norm["width"] > 0:
        _norm_rows(norm, given, rows, given, 0)
        for row in range(rows[0], rows[1]):
            for i in range(hidden.shape[1]):
                hidden[row, i] = as_stored(hidden, load(hidden[row, i]) + load(given[row, i]))


@inner()
def _strips(product, like, num_in):
    shape = product["num_strips"], product["num_steps"], LANES * num_in // product["num_steps"]
    return array_at(product["strips"], shape, like), array_at(
        product["biases"], (product["num_strips"] * LANES,), _FLOATS
    )


@inner()
def _product(product, like, given, part, num_parts, is_added, output):
    strips, biases = _strips(product, like, given.shape[1])
    product_part(strips, biases, product["uses_amx"] != 0, given, part, num_parts, is_added, output)


@inner()
def _add_product(product, norm, like, given, part, num_parts, hidden, output):
    """Add a product to `hidden`, or write it to `output` if it has to be normed first."""
    if norm["width"] > 0:
        _product(product, like, given, part, num_parts, False, output)
    else:
        _product(product, like, given, part, num_parts, True, hidden)


@inner()
def _rotate_and_store(layer, like, heads, rows, slots_at, rope, places_at):
    """Norm and rotate queries and keys in place, and write keys and values to their rows of the cache."""
    head_dim, num_heads, num_kv_heads = layer["head_dim"], layer["num_heads"], layer["num_kv_heads"]
    cos, sin = array_at(rope[0], (rope[2], head_dim), like), array_at(rope[1], (rope[2], head_dim), like)
    slots, places = array_at(slots_at, (len(heads),), _INTS), array_at(places_at, (len(heads),), _INTS)
    width = num_kv_heads * head_dim
    keys = array_at(layer["keys"], (layer["num_slots"] * layer["key_stride"],), like)
    values = array_at(layer["values"], (layer["num_slots"] * layer["value_stride"],), like)
    for row in range(rows[0], rows[1]):
        numbers, slot = heads[row], slots[row] + (layer["num_slots"] if slots[row] < 0 else 0)
        key_at, value_at = slot * layer["key_stride"], slot * layer["value_stride"]
        angle = max(0, min(places[row] if places_at != 0 else row, rope[2] - 1))
        for head in range(num_heads + num_kv_heads):
            start = head * head_dim
            norm = layer["query_norm"] if head < num_heads else layer["key_norm"]
            if norm["width"] > 0:
                norm_row(numbers, start, _weight(norm), norm["eps"], norm["rounds_first"], numbers, start)
            rotate_row(numbers, start, cos[angle], sin[angle], numbers, start)
        start = num_heads * head_dim
        for i in range(width):
            keys[key_at + i] = numbers[start + i]
            values[value_at + i] = numbers[start + width + i]


@inner()
def _attend(function, layer, part, num_parts, like, heads_at, attended_at, num_tokens, chunks, paths, places):
    """Compute attention by `attend_part`. function: its address."""
    num_heads, num_kv_heads, head_dim = layer["num_heads"], layer["num_kv_heads"], layer["head_dim"]
    addresses = heads_at, layer["keys"], layer["values"], attended_at
    strides = layer["query_key_value"]["num_out"], layer["key_stride"], layer["value_stride"]
    shape = num_tokens, layer["num_slots"], num_heads, num_kv_heads, head_dim, head_dim
    features = (
        layer["attends_by_amx"],
        layer["scaling"],
        layer["window"],
        layer["softcap"],
        array_at(layer["sinks"], (layer["num_sinks"],), _FLOATS),
    )
    call_at(function, (part, num_parts, like, addresses, strides, shape, chunks, paths, places, *features))


@inner()
def _gate(product, activation, like, given, part, num_parts, gated):
    """Multiply rows with one part of the gate's strips, and with the same part of those of `up`, which follow them.
    Write activation(gate) * up to `gated`."""
    strips, biases = _strips(product, like, given.shape[1])
    wide = np.empty((2 * MOST_AT_ONCE, MOST_STRIPS * LANES), dtype=like.dtype)
    narrow = np.empty((2 * MOST_AT_ONCE, LANES), dtype=like.dtype)
    scratch = np.empty(MOST_AT_ONCE * MOST_STRIPS * LANES, dtype=np.float32)
    num_gates, uses_amx = len(strips) // 2, product["uses_amx"] != 0
    strip, end = num_gates * part // num_parts, num_gates * (part + 1) // num_parts
    num_rows = 0
    while strip < end:
        num_strips = strips_at_once(end - strip, uses_amx, len(given))
        both = wide if num_strips > 1 else narrow
        row, first = 0, strip * LANES
        while row < len(given):
            rows = given, row, biases, both
            num_rows = multiply_some(strips, strip, num_strips, uses_amx, num_rows, *rows, 0, 0, False)
            up = num_gates + strip
            multiply_some(strips, up, num_strips, uses_amx, num_rows, *rows, MOST_AT_ONCE, 0, False)
            activate(both[:MOST_AT_ONCE], both[MOST_AT_ONCE:], num_rows, activation, scratch, gated, row, first)
            row += num_rows
        strip += num_strips
    if uses_amx:
        release_tiles()
