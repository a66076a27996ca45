"""Acceptance by context length and by group of the prompts, and under the names that vLLM gives the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_core.engine.metrics import DraftCounts
from specdec_tools.compare import Comparison, Run

SHORTEST = 128
"""Contexts of fewer tokens are counted together."""


def context_start(num_tokens: int) -> int:
    """Return the least length of the interval of context lengths that a context belongs to: 0 for fewer than SHORTEST
    tokens, else the largest power of two that is not above."""
    return 0 if num_tokens < SHORTEST else 1 << (num_tokens.bit_length() - 1)


def context_title(start: int) -> str:
    """Describe the interval of context lengths that begins at `start`."""
    return f"under {SHORTEST}" if not start else f"{start} to {2 * start - 1}"


def by_context(runs: Iterable[Run]) -> dict[int, DraftCounts]:
    """Count drafts by the number of tokens, of prompt and output, that each was made from.

    Returns {least length of the interval: counts}, in ascending order. A run whose prompts are not known counts as one
    without prompts. Draft tokens are not counted: num_draft_tokens is 0.
    """
    found: dict[int, DraftCounts] = {}
    for run in runs:
        prompt_lens = [len(prompt) for prompt in run.prompt_token_ids] or [0] * len(run.request_ids)
        for draft in run.drafts():
            start = context_start(prompt_lens[draft.completion] + draft.start)
            found.setdefault(start, DraftCounts()).add(0, draft.num_accepted)
    return dict(sorted(found.items()))


def by_group(comparisons: Iterable[Comparison]) -> dict[str, DraftCounts]:
    """Count the drafts of speculative runs by the group of their prompts. Draft tokens are not counted."""
    found: dict[str, DraftCounts] = {}
    for comparison in comparisons:
        for run in comparison.speculative if comparison.groups else ():
            for draft in run.drafts():
                found.setdefault(comparison.groups[draft.completion], DraftCounts()).add(0, draft.num_accepted)
    return found


def vllm_fields(drafts: DraftCounts) -> Mapping[str, Any]:
    """Return the acceptance figures under the names, and in the units, of `vllm bench serve --save-result`.

    The acceptance rate is in percent there. It and the number of draft tokens are left out where draft tokens were not
    counted.
    """
    counted = {
        "spec_decode_acceptance_rate": 100 * drafts.acceptance_rate,
        "spec_decode_draft_tokens": drafts.num_draft_tokens,
    }
    return {
        "spec_decode_acceptance_length": drafts.acceptance_length,
        "spec_decode_num_drafts": drafts.num_drafts,
        "spec_decode_accepted_tokens": drafts.num_accepted,
        "spec_decode_per_position_acceptance_rates": drafts.acceptance_rate_per_pos,
        **(counted if drafts.num_draft_tokens or not drafts.num_drafts else {}),
    }
