"""Turns the target's raw logits into a verifier's input: applies all sampling parameters to each row of logits, with
the row's own history of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec_core.config.sampling import SamplingParams
from specdec_core.ops import REFERENCE
from specdec_core.sampling.bad_words import forbid_bad_words
from specdec_core.sampling.constraints import ConstrainedRows, Constraints
from specdec_core.sampling.grammar import follow_grammar
from specdec_core.sampling.penalties import penalize_history
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
    (lambda c: c.bad_words is not None, forbid_bad_words),
    (lambda c: c.min_tokens > 0, forbid_early_end),
    (lambda c: len(c.bias_ids) > 0, add_bias),
    (lambda c: len(c.params.logits_processors) > 0, run_processors),
    (lambda c: c.grammar is not None, follow_grammar),
)
"""In vLLM's order, pairs of functions: whether a request uses a sampling parameter, and what applies it, in place, to
the logits [num_rows, vocab] at such requests' rows. Grammars, which vLLM has first, come after logits processors, which
may allow a token again. Penalties follow."""


def process_logits(
    logits: torch.Tensor,
    row_requests: np.ndarray,
    params: Sequence[SamplingParams],
    constraints: ConstrainedRows | None = None,
    ops: Mapping[str, Callable[..., Any]] = REFERENCE,
) -> torch.Tensor:
    """Apply the sampling parameters of each row's request to logits [num_rows, vocab]. Returns float32, or float64 if
    the logits are; does not change its input.

    row_requests: int64 [num_rows], indices into params, on the host.
    params: the sampling parameters of each request.
    constraints: the rows of requests with parameters other than temperature, min_p, top_k and top_p; None: there are
        none.
    ops: {name of an operation: operation}, with `penalize` and `truncate`.

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
        if (asking := constraints.where(lambda c: c.penalizes)) is not None:
            penalize_history(logits, asking, ops["penalize"])
        logits.masked_fill_(~is_sound, torch.nan)
    processed: torch.Tensor = logits if is_greedy else ops["truncate"](logits, *_per_row(params, row_requests))
    return processed


def _per_row(params: Sequence[SamplingParams], row_requests: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the temperature, min_p, top_k and top_p of each row, [num_rows], as `ops.truncation.truncate` gets them."""
    yield np.array([0.0 if p.is_greedy else p.temperature for p in params])[row_requests]
    yield np.array([p.min_p for p in params])[row_requests]
    yield np.array([max(0, p.top_k) for p in params])[row_requests]
    yield np.array([p.top_p for p in params])[row_requests]
