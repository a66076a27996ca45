"""Counts new tokens and penalizes those in the history of each row, for all requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from specdec_core import upload
from specdec_core.ops.penalties import penalize as reference
from specdec_core.ops.token_counts import TokenCounts
from specdec_kernels.gpu.interpreted import AS_WRITTEN

BLOCK = 1024
"""Columns of a row that one program penalizes, and new tokens that one program counts."""


def penalize(
    logits: torch.Tensor,
    path: torch.Tensor,
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    penalties: np.ndarray,
    counts: Sequence[TokenCounts],
    new: Sequence[np.ndarray],
) -> None:
    """As `specdec_core.ops.penalties.penalize`, which takes float64, too."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        reference(logits, path, first_rows, num_rows, penalties, counts, new)
        return
    requests, repeats = np.arange(len(counts)), np.array(num_rows)
    owners, num_new = requests.repeat(repeats), [len(each) for each in new]
    rows = np.array(first_rows)[owners] + np.arange(len(owners)) - (repeats.cumsum() - repeats)[owners]
    tables = np.array([each.counts.data_ptr() for each in counts], dtype=np.int64)
    # Columns: the row, the address of its request's counts, and its penalties.
    of_rows = np.stack([rows, tables[owners], *penalties.view(np.int64)[owners].T], axis=1)
    of_new = np.stack([np.concatenate(new), tables.repeat(num_new)], axis=1)
    packed = upload(np.concatenate([of_rows.ravel(), of_new.ravel()]), logits.device)
    if sum(num_new):
        _count[(triton.cdiv(sum(num_new), BLOCK),)](packed, of_rows.size, sum(num_new), BLOCK)
    vocab_size, (_, max_depth) = logits.shape[1], path.shape
    grid = len(rows), triton.cdiv(vocab_size, BLOCK)
    _penalize[grid](logits, path.contiguous(), packed, logits.stride(0), vocab_size, max_depth, BLOCK, **AS_WRITTEN)


@triton.jit(do_not_specialize=["first", "num_new"])
def _count(packed_at, first, num_new, BLOCK: tl.constexpr):
    """Some of the new tokens."""
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = each < num_new
    place = tl.load(packed_at + first + 2 * each, mask=is_there, other=0)
    table = tl.load(packed_at + first + 2 * each + 1, mask=is_there, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_add(table + place, 1, mask=is_there)


@triton.jit(do_not_specialize=["max_depth"])
def _penalize(logits_at, path_at, packed_at, stride, vocab_size, max_depth, BLOCK: tl.constexpr):
    """Some columns of one row."""
    i = tl.program_id(0).to(tl.int64)
    of_row = packed_at + 5 * i
    counts_at = tl.load(of_row + 1).to(tl.pointer_type(tl.int32))
    repetition = tl.load(of_row + 2).to(tl.float64, bitcast=True).to(tl.float32)
    frequency = tl.load(of_row + 3).to(tl.float64, bitcast=True).to(tl.float32)
    presence = tl.load(of_row + 4).to(tl.float64, bitcast=True).to(tl.float32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < vocab_size
    in_prompt = tl.load(counts_at + column, mask=is_there, other=0)
    in_output = tl.load(counts_at + vocab_size + column, mask=is_there, other=0)
    for depth in range(max_depth):
        in_output += (tl.load(path_at + i * max_depth + depth) == column).to(tl.int32)  # -1 is no column
    occurs = in_prompt + in_output > 0
    at = logits_at + tl.load(of_row) * stride + column
    logit = tl.load(at, mask=occurs, other=0.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition + tl.zeros_like(logit)), logit * repetition)
    times = in_output.to(tl.float32)
    tl.store(at, logit - frequency * times - tl.where(times > 0, presence, 0.0), mask=occurs)
