"""What each operation of specdec_core.ops is measured on.

For another operation, write a generator of cases and add it to CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from attrs import evolve
from torch.nn.functional import linear

from on_gpu.case import BLOCK_SIZE, DTYPE, SIZE, Bound, Case, Operation, cache_of, heads_of, random
from on_gpu.layer_cases import layer_cases
from on_gpu.setup import Sizes
from specdec_core import Draft
from specdec_core.ops.token_counts import TokenCounts
from specdec_core.verifiers.siblings import Siblings, proposals_of

NUM_NODES = 7  # of the chains in attention, which are verified with their root
NUM_BEST = 10  # tokens of a row that a draft tree takes


def attention_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    num_heads, num_kv_heads, dim = heads_of(sizes)
    for context, batch, rows in product(sizes.contexts, sizes.batches, (1, 1 + NUM_NODES)):
        num_bytes = SIZE * batch * (2 * context * num_kv_heads * dim + 2 * rows * num_heads * dim)
        num_flops = 4 * batch * rows * context * num_heads * dim

        def bind(context: int = context, batch: int = batch, rows: int = rows) -> Callable[[Operation], Bound]:
            keys, values, plan = cache_of(sizes, batch, context, rows, device)
            query = random(batch * rows, num_heads, dim, device=device)
            return lambda op: partial(op, query, keys, values, plan, dim**-0.5)

        yield Case({"batch": batch, "context": context, "tokens": rows}, num_bytes, num_flops, bind)


def store_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    _, num_kv_heads, dim = heads_of(sizes)
    for context, batch in product(sizes.contexts, sizes.batches):

        def bind(context: int = context, batch: int = batch) -> Callable[[Operation], Bound]:
            keys, values, plan = cache_of(sizes, batch, context, 1, device)
            key, value = (random(batch, num_kv_heads, dim, device=device) for _ in range(2))
            slots = plan.metadata.slot_mapping

            def bound(op: Operation) -> Bound:
                own = keys.clone(), values.clone()  # what another one has stored is not there

                def store() -> tuple[torch.Tensor, ...]:
                    op(*own, slots, key, value)
                    return own

                return store

            return bound

        num_bytes = 4 * SIZE * batch * num_kv_heads * dim
        yield Case({"batch": batch, "context": context}, num_bytes, 0, bind, tolerance=0.0)


def linear_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """The layers of a Llama whose projections of one input are one layer."""
    shape = sizes.kernel_shape
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    num_heads, num_kv_heads, dim = heads_of(sizes)
    layers = {
        "qkv": ((num_heads + 2 * num_kv_heads) * dim, hidden),
        "o": (hidden, num_heads * dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (shape["vocab_size"], hidden),
    }
    for (name, (num_out, num_in)), rows in product(layers.items(), sizes.linear_rows):

        def bind(rows: int = rows, num_out: int = num_out, num_in: int = num_in) -> Callable[[Operation], Bound]:
            weight, given = (random(n, num_in, device=device) * num_in**-0.5 for n in (num_out, rows))
            # The reference of a GPU packs nothing, and torch's own layer runs.
            return lambda op: partial(op(weight, None) or partial(linear, weight=weight), given)

        num_bytes = SIZE * (num_out * num_in + rows * (num_in + num_out))
        yield Case({"layer": name, "rows": rows}, num_bytes, 2 * rows * num_out * num_in, bind)


def norm_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    width = sizes.kernel_shape["hidden_size"]
    for rows in sizes.rows:

        def bind(rows: int = rows) -> Callable[[Operation], Bound]:
            hidden, weight = random(rows, width, device=device), random(width, device=device)
            return lambda op: partial(op, hidden, weight, 1e-5)

        yield Case({"rows": rows}, SIZE * (2 * rows + 1) * width, 4 * rows * width, bind)


def rotary_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    num_heads, num_kv_heads, dim = heads_of(sizes)
    for rows in sizes.rows:

        def bind(rows: int = rows) -> Callable[[Operation], Bound]:
            query, key = (
                random(1, rows, number, dim, device=device).transpose(1, 2) for number in (num_heads, num_kv_heads)
            )
            angles = torch.rand(1, rows, dim, device=device)
            return lambda op: partial(op, query, key, angles.cos().to(DTYPE), angles.sin().to(DTYPE))

        both = (num_heads + num_kv_heads) * dim
        yield Case({"rows": rows}, SIZE * rows * (2 * both + 2 * dim), 3 * rows * both, bind)


def draw_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=4):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            weights = (3 * torch.randn(rows, vocab_size, device=device)).softmax(-1)
            uniform = torch.rand(rows, dtype=torch.float64, device=device)
            return lambda op: partial(op, weights, uniform)

        yield Case({"rows": rows, "vocabulary": vocab_size}, num_bytes, rows * vocab_size, bind)


def likeliest_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=SIZE):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            logits = random(rows, vocab_size, device=device)
            return lambda op: partial(op, logits)

        yield Case({"rows": rows, "vocabulary": vocab_size}, num_bytes, rows * vocab_size, bind)


def truncate_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """With top-k and top-p, as is common. The result is written, too."""
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=4):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            logits = 3 * torch.randn(rows, vocab_size, device=device)
            parameters = (np.full(rows, 0.8), np.zeros(rows), np.full(rows, 50), np.full(rows, 0.9))
            return lambda op: partial(op, logits, *parameters)

        yield Case({"rows": rows, "vocabulary": vocab_size}, 2 * num_bytes, rows * vocab_size, bind)


def most_likely_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=4):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            logits = 3 * torch.randn(rows, vocab_size, device=device)
            return lambda op: partial(op, logits, NUM_BEST)

        yield Case({"rows": rows, "vocabulary": vocab_size}, num_bytes, rows * vocab_size, bind)


def penalize_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """One row of each request. The logits are copied first, since they are changed in place: both are counted."""
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=4):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            logits = 3 * torch.randn(rows, vocab_size, device=device)
            path = torch.full((rows, NUM_NODES), -1, device=device)
            counts = [_counts(vocab_size, device) for _ in range(rows)]
            penalties = np.tile([1.2, 0.1, 0.1], (rows, 1))
            new = [np.empty(0, dtype=np.int64)] * rows  # what is counted already stays

            def bound(op: Operation) -> Bound:
                def penalized() -> torch.Tensor:
                    own = logits.clone()
                    op(own, path, range(rows), [1] * rows, penalties, counts, new)
                    return own

                return penalized

            return bound

        yield Case({"rows": rows, "vocabulary": vocab_size}, 6 * num_bytes, 6 * rows * vocab_size, bind)


def residuals_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """A chain of sampled draft tokens, and what block verification asks about each. Logits and draft probabilities are
    read twice: for their sums, then for the residuals."""
    for rows, vocab_size, num_bytes in _of_logits(sizes, dtype_size=4):

        def bind(rows: int = rows, vocab_size: int = vocab_size) -> Callable[[Operation], Bound]:
            logits = 3 * torch.randn(rows + 1, vocab_size, device=device)
            q = torch.randn(rows, vocab_size, device=device).softmax(-1)
            q_rows = torch.arange(rows, dtype=torch.int32, device=device)
            draft = evolve(Draft.from_chains([[7] * rows], device), q=q, q_rows=q_rows)
            proposals = proposals_of(draft, Siblings.of(draft), vocab_size)
            nodes, scale = q_rows.long() + 1, torch.ones(rows, device=device)
            return lambda op: lambda: op(logits, proposals).missed(nodes, scale)

        yield Case({"rows": rows, "vocabulary": vocab_size}, 4 * num_bytes, 6 * rows * vocab_size, bind)


def compact_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """In all layers, the later half of each request's nodes moves to the places of the others."""
    shape = sizes.kernel_shape
    num_layers, (_, num_kv_heads, dim), half = shape["num_hidden_layers"], heads_of(sizes), (1 + NUM_NODES) // 2
    for batch in sizes.batches:

        def bind(batch: int = batch) -> Callable[[Operation], Bound]:
            keys, values = (random(num_layers, batch * BLOCK_SIZE, num_kv_heads, dim, device=device) for _ in range(2))
            first = torch.arange(batch, device=device).mul_(BLOCK_SIZE).unsqueeze(1)
            places = (first + torch.arange(half, device=device)).flatten()

            def bound(op: Operation) -> Bound:
                own = keys.clone(), values.clone()

                def moved() -> tuple[torch.Tensor, ...]:
                    op(*own, places + half, places)
                    return own

                return moved

            return bound

        num_bytes = 4 * SIZE * num_layers * batch * half * num_kv_heads * dim
        yield Case({"batch": batch, "moved": half * batch}, num_bytes, 0, bind, tolerance=0.0)


CASES: dict[str, Callable[[Sizes, str], Iterator[Case]]] = {
    "paged_attention": attention_cases,
    "store_kv": store_cases,
    "pack_linear": linear_cases,
    "fuse_layers": layer_cases,
    "rms_norm": norm_cases,
    "rotary": rotary_cases,
    "draw": draw_cases,
    "likeliest": likeliest_cases,
    "truncate": truncate_cases,
    "compact": compact_cases,
    "penalize": penalize_cases,
    "most_likely": most_likely_cases,
    "residuals": residuals_cases,
}
"""By the name of the operation: a generator of its cases, for given sizes and a device."""


def _of_logits(sizes: Sizes, dtype_size: int) -> Iterator[tuple[int, int, int]]:
    """Rows of logits or probabilities, their length, and their bytes together."""
    vocab_size = sizes.kernel_shape["vocab_size"]
    for rows in sizes.rows:
        yield rows, vocab_size, dtype_size * rows * vocab_size


def _counts(vocab_size: int, device: str) -> TokenCounts:
    """Of a text of 200 tokens, half of which are the prompt."""
    counts = TokenCounts(0, vocab_size, torch.device(device))
    places = counts.read(np.arange(200) ** 2 % vocab_size, 100)
    counts.counts.view(-1).index_add_(0, torch.from_numpy(places).to(device), torch.ones(200).int().to(device))
    return counts
