"""Turns the target's raw logits into a verifier's input: applies all sampling parameters to each row of logits, with
the row's own history of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_core.config.sampling import SamplingParams
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
    row_requests: torch.Tensor,
    params: Sequence[SamplingParams],
    constraints: ConstrainedRows | None = None,
) -> torch.Tensor:
    """Apply the sampling parameters of each row's request to logits [num_rows, vocab]. Returns float32, or float64 if
    the logits are; does not change its input.

    row_requests: int64 [num_rows], indices into params.
    params: the sampling parameters of each request.
    constraints: the rows of requests with parameters other than temperature, min_p, top_k and top_p; None: there are
        none.

    Rows of greedy requests become -inf except at the argmax, unless every request is greedy. Unused parameters cost no
    time.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if constraints is not None:
        # A row that was not finite fails its request, even where a mask hides the reason.
        is_sound = logits.amax(dim=1, keepdim=True).isfinite()
        logits = logits.clone()
        for is_asked, apply in IN_ORDER:
            if (asking := constraints.where(is_asked)) is not None:
                apply(logits, asking)
        logits.masked_fill_(~is_sound, torch.nan)
    return logits if all(p.is_greedy for p in params) else truncate(logits, row_requests, params)


def truncate(logits: torch.Tensor, row_requests: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply temperature, min_p, top_k and top_p of each row's request to logits [num_rows, vocab]. Rows of greedy
    requests become -inf except at the argmax.

    row_requests: int64 [num_rows], indices into params.
    params: the sampling parameters of each request; at least one is not greedy.
    """

    def per_row(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:  # [num_rows, 1]
        return torch.tensor(values, dtype=dtype, device=logits.device)[row_requests].unsqueeze(1)

    dtype = logits.dtype
    logits = logits / per_row([1.0 if p.is_greedy else p.temperature for p in params], dtype)
    if any(p.min_p > 0 for p in params):
        logits = _keep_min_p(logits, per_row([p.min_p for p in params], dtype))
    if any(p.top_k > 0 for p in params):
        logits = _keep_top_k(
            logits, per_row([max(p.top_k, 0) for p in params], torch.int64), max(p.top_k for p in params)
        )
    if any(p.top_p < 1 for p in params):
        logits = _keep_top_p(logits, per_row([p.top_p for p in params], dtype))
    if any(p.is_greedy for p in params):
        is_greedy = per_row([p.is_greedy for p in params], torch.bool)
        is_best = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), True)
        # A row of NaN stays NaN, so that the verifier fails its request and no other.
        logits = logits.masked_fill(is_greedy & ~is_best & ~logits.isnan(), -torch.inf)
    return logits


def _keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return a copy of the logits with -inf for each token less likely than min_p [num_rows, 1] times the likeliest
    one."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)


def _keep_top_k(logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the k likeliest tokens and ties with the k-th. k: int64
    [num_rows, 1]; 0 keeps all tokens. largest_k: the largest k of all rows."""
    largest = logits.topk(min(largest_k, logits.shape[-1]), dim=-1).values
    least = largest.gather(1, (k - 1).clamp(0, largest.shape[-1] - 1))
    return logits.masked_fill((logits < least) & (k > 0), -torch.inf)


def _keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return a copy of the logits with -inf for all but the smallest set of likeliest tokens whose probability reaches
    top_p [num_rows, 1]; 1 keeps all tokens."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    dropped = (before >= top_p) & (top_p < 1)  # rounding may take the sum to 1 before the end
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), -torch.inf)
