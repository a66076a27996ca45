"""Residual distributions of rejection sampling. Logits and draft probabilities are read where they are, once for each
sum over the vocabulary, and only where an answer depends on them. Sums are float64, first of parts of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec_core.ops.residuals import Proposals, Residuals as Reference

PART, BLOCK = 4096, 1024
"""Columns of a part, and those that are summed at once. They are the same for all rows, whatever else is verified."""
MOST_PARTS = 1024
NODES = 64
"""Draft tokens whose ratios one program computes."""


def residuals(logits: torch.Tensor, proposals: Proposals) -> Any:
    """As `specdec_core.ops.residuals.Residuals`, which takes other dtypes and longer rows."""
    is_taken = logits.dtype == torch.float32 and triton.cdiv(logits.shape[1], PART) <= MOST_PARTS
    return Residuals(logits, proposals) if is_taken else Reference(logits, proposals)


class Residuals:
    """As the reference, but without a copy of the target's probabilities: of a row of logits, the largest one and the
    sum are kept, and of a row from which a draft token was refused, the residual is written once.

    A row's distribution has a source. Source i below `num_rows` is the row i of logits, source num_rows + i the
    residual that was left when the draft token i was refused. `_factors` makes a source sum to 1.
    """

    def __init__(self, logits: torch.Tensor, proposals: Proposals) -> None:
        self._logits = self._left = logits if logits.stride(1) == 1 else logits.contiguous()
        self._proposals = proposals
        num_rows, self._num_columns = logits.shape
        self._num_parts = triton.cdiv(self._num_columns, PART)
        self._block_parts = triton.next_power_of_2(self._num_parts)
        self._sources = torch.arange(num_rows + 1, device=logits.device)
        self._largest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        self._factors = torch.empty(2 * num_rows, dtype=torch.float64, device=logits.device)
        largest = torch.empty(num_rows, self._num_parts, dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(largest, dtype=torch.float64)
        _weigh_parts[(num_rows, self._num_parts)](
            self._logits, largest, sums, self._logits.stride(0), self._num_columns, self._num_parts, PART, num_warps=8
        )
        _weigh_rows[(num_rows,)](largest, sums, self._largest, self._factors, self._num_parts, self._block_parts)
        self.is_nan = self._factors[:num_rows].isnan()
        self._drawn = _Drawn(self._logits, proposals)

    def ratios(self, nodes: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(nodes), dtype=torch.float32, device=nodes.device)
        if len(nodes):
            _ratios[(triton.cdiv(len(nodes), NODES),)](*self._arguments(nodes), found, len(nodes), NODES)
        return found

    def missed(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self._rest(nodes, scale, False)

    def refuse(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self._left is self._logits:
            self._left = torch.empty(self._logits.shape, dtype=torch.float32, device=nodes.device)
        return self._rest(nodes, scale, True)

    def weights(self, rows: torch.Tensor) -> torch.Tensor:
        weights = torch.empty(len(rows), self._num_columns, dtype=torch.float32, device=rows.device)
        if len(rows):
            target, sizes = self._arguments(rows)[:6], (self._logits.stride(0), self._num_columns)
            _weights[(len(rows), self._num_parts)](*target, weights, *sizes, self._proposals.end, PART, BLOCK)
        return weights

    def _rest(self, nodes: torch.Tensor, scale: torch.Tensor, is_refused: bool) -> torch.Tensor:
        missed = torch.empty(len(nodes), dtype=torch.float32, device=nodes.device)
        if len(nodes):
            sums = torch.empty(len(nodes), self._num_parts, dtype=torch.float64, device=nodes.device)
            _rest_of_parts[(len(nodes), self._num_parts)](
                *self._arguments(nodes), scale.contiguous(), sums, self._num_parts, is_refused, PART, BLOCK
            )
            of_rows = nodes.contiguous(), self._proposals.parent_rows, self._sources, self._factors, self._proposals.end
            _finish[(len(nodes),)](sums, missed, *of_rows, self._num_parts, is_refused, self._block_parts)
        return missed

    def _arguments(self, nodes: torch.Tensor) -> tuple[Any, ...]:
        """What kernels get first: the target's rows, then the draft tokens and their rows of q, then sizes."""
        given, drawn = self._proposals, self._drawn
        target = self._logits, self._left, self._sources, self._largest, self._factors
        tokens = given.token_ids, given.parent_rows, given.q_rows
        of_q = drawn.q, drawn.factors, drawn.column_of, drawn.earlier
        sizes = self._logits.stride(0), drawn.q.stride(0), self._num_columns, given.end, drawn.earlier.shape[1]
        return *target, nodes.contiguous(), *tokens, *of_q, *sizes, given.q_to_target is not None


class _Drawn:
    """The draft distributions as kernels read them.

    q: float32 [num_q_rows, draft_vocab or vocab]; without sampled draft tokens any tensor, which is not read.
    column_of: int32 [vocab], the column of q of each token of the target, -1: none; not read without `q_to_target`.
    earlier: int32 [end + 1, k], the columns of earlier siblings, which have probability 0; -1: none.
    factors: float64 [end + 1], what makes each draft token's row of q, without its earlier siblings, sum to 1.
    """

    def __init__(self, logits: torch.Tensor, given: Proposals) -> None:
        self.column_of = torch.empty(0, dtype=torch.int32, device=logits.device)
        self.earlier = torch.empty(len(given.earlier), 0, dtype=torch.int32, device=logits.device)
        if given.q is None or not len(given.q):
            self.q, self.factors = logits, torch.ones(given.end + 1, dtype=torch.float64, device=logits.device)
            return
        q = self.q = given.q.to(torch.float32).contiguous()
        if given.q_ids is not None:
            self.q = q.new_zeros(len(q), given.vocab_size).scatter_(1, given.q_ids, q)
        if given.column_of is not None:
            self.column_of = given.column_of.to(torch.int32)
        if not given.earlier.shape[1]:
            sums = _sums(q, torch.arange(len(q), device=q.device), self.earlier)
            self.factors = (1 / sums)[given.q_rows.clamp(min=0)]
            return
        tokens = given.token_ids[given.earlier]
        columns = tokens if given.column_of is None else given.column_of[tokens]
        self.earlier = columns.masked_fill(given.earlier == given.end, -1).to(torch.int32)
        self.factors = 1 / _sums(self.q, given.q_rows, self.earlier)


def _sums(q: torch.Tensor, q_rows: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """float64 [n]   sums of rows of q, int64 [n], without the columns in `earlier`, int32 [n, k]; 0 for row -1."""
    num_parts = triton.cdiv(q.shape[1], PART)
    sums = torch.empty(len(q_rows), num_parts, dtype=torch.float64, device=q.device)
    totals = torch.empty(len(q_rows), dtype=torch.float64, device=q.device)
    sizes = q.stride(0), q.shape[1], num_parts, earlier.shape[1]
    _sum_parts_of_q[(len(q_rows), num_parts)](q, q_rows, earlier, sums, *sizes, PART, BLOCK)
    _add[(len(q_rows),)](sums, totals, num_parts, triton.next_power_of_2(num_parts))
    return totals


@triton.jit
def _weigh_parts(logits_at, largest_at, sums_at, stride, num_columns, num_parts, PART: tl.constexpr):
    """One part of one row: its largest finite logit, and the sum of exp(logit - largest), which is not finite if a
    logit is NaN or +inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    logit = tl.load(logits_at + row * stride + column, mask=column < num_columns, other=float("-inf"))
    largest = tl.max(tl.where(logit < float("inf"), logit, float("-inf")))
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(largest_at + row * num_parts + part, largest)
    tl.store(sums_at + row * num_parts + part, tl.sum(tl.exp(logit - shift).to(tl.float64)))


@triton.jit
def _weigh_rows(part_largest_at, sums_at, largest_at, factors_at, num_parts, BLOCK_PARTS: tl.constexpr):
    """One row: what its logits are shifted by, and the factor of their exponentials, NaN if a logit is NaN or +inf, or
    all are -inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_PARTS)
    largest = tl.load(part_largest_at + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    sums = tl.load(sums_at + row * num_parts + part, mask=part < num_parts, other=0.0)
    most = tl.max(largest)
    shift = tl.where(most > float("-inf"), most, 0.0)
    share = tl.where(largest > float("-inf"), tl.exp(largest - shift), 1.0)
    total = tl.sum(sums * share.to(tl.float64))
    tl.store(largest_at + row, shift)
    tl.store(factors_at + row, 1.0 / tl.where((total > 0) & (total < float("inf")), total, float("nan")))


@triton.jit
def _sum_parts_of_q(
    q_at,
    q_rows_at,
    earlier_at,
    sums_at,
    stride,
    num_columns,
    num_parts,
    num_earlier,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_row = tl.load(q_rows_at + row)
    total = tl.zeros([BLOCK], tl.float64)
    if q_row >= 0:
        for first in range(0, PART, BLOCK):
            column = part * PART + first + tl.arange(0, BLOCK)
            prob = tl.load(q_at + q_row * stride + column, mask=column < num_columns, other=0.0)
            for i in range(num_earlier):
                prob = tl.where(column == tl.load(earlier_at + row * num_earlier + i), 0.0, prob)
            total += prob.to(tl.float64)
    tl.store(sums_at + row * num_parts + part, tl.sum(total))


@triton.jit
def _add(sums_at, totals_at, num_parts, BLOCK_PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_PARTS)
    tl.store(totals_at + row, tl.sum(tl.load(sums_at + row * num_parts + part, mask=part < num_parts, other=0.0)))


@triton.jit
def _ratios(
    logits_at,
    left_at,
    sources_at,
    largest_at,
    factors_at,
    nodes_at,
    token_ids_at,
    parent_rows_at,
    q_rows_at,
    q_at,
    q_factors_at,
    column_of_at,
    earlier_at,
    logits_stride,
    q_stride,
    num_columns,
    end,
    num_earlier,
    IS_MAPPED: tl.constexpr,
    ratios_at,
    num_nodes,
    NODES: tl.constexpr,
):
    """NODES draft tokens."""
    i = tl.program_id(0) * NODES + tl.arange(0, NODES)
    node = tl.load(nodes_at + i, mask=i < num_nodes, other=end)
    is_node = node < end
    token = tl.load(token_ids_at + node, mask=is_node, other=0)
    parent = tl.load(parent_rows_at + node, mask=is_node, other=end)
    is_node &= parent < end  # a root has none
    source = tl.load(sources_at + parent, mask=is_node, other=0)
    is_logit, is_left = is_node & (source < end), is_node & (source >= end)
    logit = tl.load(logits_at + source * logits_stride + token, mask=is_logit, other=0.0)
    largest = tl.load(largest_at + source, mask=is_logit, other=0.0)
    left = tl.load(left_at + (source - end) * num_columns + token, mask=is_left, other=0.0)
    number = tl.where(is_left, left, tl.exp(logit - largest)).to(tl.float64)
    prob = number * tl.load(factors_at + source, mask=is_node, other=0.0)

    q_row = tl.load(q_rows_at + node, mask=is_node, other=-1)
    is_sampled = q_row >= 0
    column = token
    if IS_MAPPED:
        column = tl.load(column_of_at + token, mask=is_sampled, other=-1).to(tl.int64)
    drawn = tl.load(q_at + q_row * q_stride + column, mask=is_sampled & (column >= 0), other=0.0).to(tl.float64)
    drawn = tl.where(is_sampled, drawn * tl.load(q_factors_at + node, mask=is_sampled, other=1.0), 1.0)
    ratio = tl.where(drawn > 0, prob / tl.where(drawn > 0, drawn, 1.0), float("inf"))
    tl.store(ratios_at + i, ratio.to(tl.float32), mask=i < num_nodes)


@triton.jit
def _rest_of_parts(
    logits_at,
    left_at,
    sources_at,
    largest_at,
    factors_at,
    nodes_at,
    token_ids_at,
    parent_rows_at,
    q_rows_at,
    q_at,
    q_factors_at,
    column_of_at,
    earlier_at,
    logits_stride,
    q_stride,
    num_columns,
    end,
    num_earlier,
    IS_MAPPED: tl.constexpr,
    scales_at,
    sums_at,
    num_parts,
    IS_REFUSED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of one draft token's residual: its sum, and what is left if the token is refused."""
    i, part = tl.program_id(0), tl.program_id(1)
    node = tl.load(nodes_at + i)
    total = tl.zeros([BLOCK], tl.float64)
    if node < end:
        source = tl.load(sources_at + tl.load(parent_rows_at + node))
        scale = tl.load(scales_at + i).to(tl.float64) * tl.load(factors_at + source)
        q_row, q_factor = tl.load(q_rows_at + node), tl.load(q_factors_at + node)
        token = tl.load(token_ids_at + node)
        for first in range(0, PART, BLOCK):
            column = part * PART + first + tl.arange(0, BLOCK)
            is_there = column < num_columns
            number = _numbers(logits_at, left_at, largest_at, source, column, logits_stride, num_columns, end)
            if q_row >= 0:
                place = column
                if IS_MAPPED:
                    place = tl.load(column_of_at + column, mask=is_there, other=-1)
                prob = tl.load(q_at + q_row * q_stride + place, mask=is_there & (place >= 0), other=0.0)
                for k in range(num_earlier):
                    prob = tl.where(place == tl.load(earlier_at + node * num_earlier + k), 0.0, prob)
                drawn = prob.to(tl.float64) * q_factor
            else:
                drawn = (column == token).to(tl.float64)
            rest = number.to(tl.float64) * scale - drawn
            rest = tl.where(rest < 0, 0.0, rest)  # NaN stays
            total += tl.where(is_there, rest, 0.0)
            if IS_REFUSED:
                tl.store(left_at + node * num_columns + column, rest.to(tl.float32), mask=is_there)
    tl.store(sums_at + i.to(tl.int64) * num_parts + part, tl.sum(total))


@triton.jit
def _numbers(logits_at, left_at, largest_at, source, column, logits_stride, num_columns, end):
    """Columns of a source, not normalized, float32."""
    if source < end:
        logit = tl.load(logits_at + source * logits_stride + column, mask=column < num_columns, other=float("-inf"))
        numbers = tl.exp(logit - tl.load(largest_at + source))
    else:
        numbers = tl.load(left_at + (source - end) * num_columns + column, mask=column < num_columns, other=0.0)
    return numbers


@triton.jit
def _finish(
    sums_at,
    missed_at,
    nodes_at,
    parent_rows_at,
    sources_at,
    factors_at,
    end,
    num_parts,
    IS_REFUSED: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One draft token: the sum of its residual, which becomes its parent's source if the token is refused."""
    i, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_PARTS)
    total = tl.sum(tl.load(sums_at + i * num_parts + part, mask=part < num_parts, other=0.0))
    tl.store(missed_at + i, total.to(tl.float32))
    if IS_REFUSED:
        node = tl.load(nodes_at + i)
        if (node < end) & (total > 0):
            tl.store(sources_at + tl.load(parent_rows_at + node), end + node)
            tl.store(factors_at + end + node, 1.0 / total)


@triton.jit
def _weights(
    logits_at,
    left_at,
    sources_at,
    largest_at,
    factors_at,
    rows_at,
    weights_at,
    logits_stride,
    num_columns,
    end,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One part of one row."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_at + i)
    if row < end:
        source = tl.load(sources_at + row)
        factor = tl.load(factors_at + source)
        for first in range(0, PART, BLOCK):
            column = part * PART + first + tl.arange(0, BLOCK)
            number = _numbers(logits_at, left_at, largest_at, source, column, logits_stride, num_columns, end)
            weight = (number.to(tl.float64) * factor).to(tl.float32)
            tl.store(weights_at + i * num_columns + column, weight, mask=column < num_columns)
