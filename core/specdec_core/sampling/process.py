"""From the target's logits to what a verifier sees: every sampling parameter, at every row, with its own history."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.config.sampling import SamplingParams
from specdec_core.sampling.bad_words import forbid_bad_words
from specdec_core.sampling.constraints import ConstrainedRows
from specdec_core.sampling.masks import add_bias, forbid_early_end, keep_allowed
from specdec_core.sampling.penalties import penalise_output, penalise_repetition
from specdec_core.sampling.processors import run_processors
from specdec_core.sampling.truncation import truncate

IN_ORDER = (
    keep_allowed,
    forbid_bad_words,
    forbid_early_end,
    add_bias,
    run_processors,
    penalise_repetition,
    penalise_output,
)
"""vLLM's order."""


def process_logits(
    logits: torch.Tensor,
    row_requests: torch.Tensor,
    params: Sequence[SamplingParams],
    constraints: ConstrainedRows | None = None,
) -> torch.Tensor:
    """What a verifier sees: logits [num_rows, vocab] as the parameters of each row's request define them, in float32,
    or in float64 if they are given so. The logits given are left as they are.

    row_requests int64 [num_rows] indexes params. constraints: the rows of requests that ask for more than temperature
    and truncation. Rows of greedy requests are -inf except at the argmax, unless every request is greedy. Parameters
    that no request uses cost nothing.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if constraints is not None:
        logits = _constrained(logits, constraints)
    return logits if all(p.is_greedy for p in params) else truncate(logits, row_requests, params)


def _constrained(logits: torch.Tensor, constraints: ConstrainedRows) -> torch.Tensor:
    """A row that was not finite fails its request, even where a mask hides the reason."""
    is_sound = logits.amax(dim=1, keepdim=True).isfinite()
    logits = logits.clone()
    for apply in IN_ORDER:
        apply(logits, constraints)
    return logits.masked_fill_(~is_sound, torch.nan)
