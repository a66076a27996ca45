"""Turns the target's raw logits into a verifier's input: applies all sampling parameters to each row of logits, with
the row's own history of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core.config.sampling import SamplingParams
from specdec_core.ops.upload import upload
from specdec_core.sampling.bad_words import forbid_bad_words
from specdec_core.sampling.constraints import ConstrainedRows, Constraints
from specdec_core.sampling.penalties import penalize_output, penalize_repetition
from specdec_core.sampling.processors import run_processors


def keep_allowed(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: set the logits of all tokens but the allowed ones (allowed_token_ids) to -inf."""
    positions, ids = rows.pairs([c.allowed_ids for c in rows.constraints if c.allowed_ids is not None])
    allowed = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    kept = logits[allowed]
    logits.index_fill_(0, rows.rows, -torch.inf)
    logits.index_put_(allowed, kept)


def forbid_early_end(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: set the logits of tokens that end the request to -inf, in rows whose output would be shorter than
    min_tokens."""
    least = np.array([c.min_tokens for c in rows.constraints])
    missing = least - [len(request.token_ids) - request.num_prompt_tokens for request in rows.requests]
    is_early = rows.depths < rows.to_device(missing[rows.owners])
    positions, ids = rows.pairs([c.end_ids for c in rows.constraints])
    forbidden = torch.where(is_early, -torch.inf, 0.0).to(logits.dtype)[rows.to_device(positions)]
    at = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    logits.index_put_(at, forbidden, accumulate=True)


def add_bias(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: add each bias of logit_bias to its token's logit."""
    positions, ids = rows.pairs([c.bias_ids for c in rows.constraints])
    _, values = rows.pairs([c.bias_values for c in rows.constraints])
    at = rows.to_device(rows.host_rows[positions]), rows.to_device(ids)
    logits.index_put_(at, rows.to_device(values).to(logits.dtype), accumulate=True)


IN_ORDER: tuple[tuple[Callable[[Constraints], bool], Callable[[torch.Tensor, ConstrainedRows], None]], ...] = (
    (lambda c: c.allowed_ids is not None, keep_allowed),
    (lambda c: len(c.bad_words) > 0, forbid_bad_words),
    (lambda c: c.min_tokens > 0, forbid_early_end),
    (lambda c: len(c.bias_ids) > 0, add_bias),
    (lambda c: len(c.params.logits_processors) > 0, run_processors),
    (lambda c: c.params.repetition_penalty != 1, penalize_repetition),
    (lambda c: c.counts_output, penalize_output),
)
"""In vLLM's order, pairs of functions: whether a request uses a sampling parameter, and what applies it, in place, to
the logits [num_rows, vocab] at such requests' rows."""


def process_logits(
    logits: torch.Tensor,
    row_requests: np.ndarray,
    params: Sequence[SamplingParams],
    constraints: ConstrainedRows | None = None,
) -> torch.Tensor:
    """Apply the sampling parameters of each row's request to logits [num_rows, vocab]. Returns float32, or float64 if
    the logits are; does not change its input.

    row_requests: int64 [num_rows], indices into params, on the host.
    params: the sampling parameters of each request.
    constraints: the rows of requests with parameters other than temperature, min_p, top_k and top_p; None: there are
        none.

    Rows of greedy requests become -inf except at the argmax, unless every request is greedy. Unused parameters cost no
    time: if every request is greedy and there are no constraints, the logits are returned as they are.
    """
    is_greedy = all(p.is_greedy for p in params)
    if constraints is None and is_greedy:
        return logits
    given = logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if constraints is not None:
        # A row that was not finite fails its request, even where a mask hides the reason.
        is_sound = logits.amax(dim=1, keepdim=True).isfinite()
        logits = logits.clone() if logits is given else logits
        for is_asked, apply in IN_ORDER:
            if (asking := constraints.where(is_asked)) is not None:
                apply(logits, asking)
        logits.masked_fill_(~is_sound, torch.nan)
    return logits if is_greedy else truncate(logits, row_requests, params)


def truncate(logits: torch.Tensor, row_requests: np.ndarray, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return a copy of logits [num_rows, vocab] with temperature, min_p, top_k and top_p of each row's request applied.
    Rows of greedy requests become -inf except at the argmax. Each parameter costs time only for rows that ask for it.

    row_requests: int64 [num_rows], indices into params, on the host.
    params: the sampling parameters of each request.
    """

    processed = logits / _column(_per_row([1 if p.is_greedy else p.temperature for p in params], row_requests), logits)
    for is_asked, value, keep in TRUNCATIONS:
        rows = np.flatnonzero(_per_row([is_asked(p) for p in params], row_requests))
        if not len(rows):
            continue
        values = _per_row([value(p) for p in params], row_requests[rows])
        if len(rows) == len(processed):
            processed = keep(processed, values)
        else:
            at = upload(rows, logits.device)
            processed.index_copy_(0, at, keep(processed.index_select(0, at), values))
    return processed


def _per_row(values: Sequence[float], row_requests: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.array(values)[row_requests]
    return found


def _column(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]   one value for each row of logits, in their dtype and on their device."""
    return upload(values, logits.device, logits.dtype).unsqueeze(1)


def _keep_min_p(logits: torch.Tensor, min_p: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for each token less likely than min_p [num_rows] times the likeliest
    one."""
    least = logits.amax(dim=-1, keepdim=True) + _column(min_p, logits).log()
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_k(logits: torch.Tensor, k: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the k likeliest tokens and ties with the k-th. k: int64
    [num_rows], at least 1."""
    k = k.clip(max=logits.shape[-1])
    last = upload(k - 1, logits.device).unsqueeze(1)
    least = logits.topk(int(k.max()), dim=-1).values.gather(1, last)
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_p(logits: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the smallest set of likeliest tokens whose probability reaches
    top_p [num_rows], below 1."""
    vocab_size = logits.shape[-1]
    # On a GPU, sorting is cheaper than to wait for the answer whether it is needed.
    size = min(LIKELIEST, vocab_size) if logits.device.type == "cpu" else vocab_size
    least, num_least, is_enough = _cut_at(logits, top_p, size)
    if size < vocab_size and not is_enough.all():
        rows = (~is_enough).nonzero().squeeze(1)
        least[rows], num_least[rows], _ = _cut_at(logits[rows], top_p[rows.numpy()], vocab_size)
    is_least = logits == least
    is_dropped = (logits < least) | (is_least & (is_least.cumsum(dim=-1, dtype=torch.int32) > num_least))
    return logits.masked_fill(is_dropped, -torch.inf)


def _cut_at(logits: torch.Tensor, top_p: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find where top-p cuts each row, by sorting its `size` likeliest tokens.

    Returns the least logit that stays, [num_rows, 1], how many tokens with this logit stay, the first ones, int64
    [num_rows, 1], and for which rows `size` was enough, bool [num_rows].
    """
    best, order = logits.topk(size) if size < logits.shape[-1] else logits.sort(descending=True)
    probs = logits.softmax(dim=-1).gather(1, order)
    num_kept = (probs.cumsum(dim=-1) - probs < _column(top_p, logits)).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = best.gather(1, num_kept - 1)
    return least, num_kept - (best > least).sum(dim=-1, keepdim=True), num_kept.squeeze(1) < size


def _keep_best(logits: torch.Tensor, _: np.ndarray) -> torch.Tensor:
    """Return a copy of the logits with -inf for all tokens but the argmax, the first of equal ones. In a row with NaN
    that is a NaN, so that the verifier fails the row's request and no other."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter_(1, best, logits.gather(1, best))


LIKELIEST = 256
"""Tokens of a row that top-p sorts first on a CPU. Few rows need more."""
TRUNCATIONS: tuple[
    tuple[
        Callable[[SamplingParams], bool],
        Callable[[SamplingParams], float],
        Callable[[torch.Tensor, np.ndarray], torch.Tensor],
    ],
    ...,
] = (
    (lambda p: not p.is_greedy and p.min_p > 0, lambda p: p.min_p, _keep_min_p),
    (lambda p: not p.is_greedy and p.top_k > 0, lambda p: p.top_k, _keep_top_k),
    (lambda p: not p.is_greedy and p.top_p < 1, lambda p: p.top_p, _keep_top_p),
    (lambda p: p.is_greedy, lambda p: 0, _keep_best),
)
"""In order: whether a request asks for a truncation, the value of its parameter, and what applies it: it gets the
logits of rows that ask, [n, vocab], and their values, [n], and returns new logits."""
