"""What `spec-decode bench` advises to change."""

from __future__ import annotations

from collections.abc import Iterator

from specdec_tools.figures import Figures
from specdec_tools.results import Result

LOW_RATE = 0.5
HIGH_RATE = 0.8
SLOWER = 0.97
"""A speed-up below this is no chance."""


def advice(result: Result) -> Iterator[str]:
    """Yield what the figures say against the settings, one line each, with what to try instead.

    Each group of prompts or load that is slower than plain decoding has a line. Acceptance is that of all prompts.
    Rates are those of single positions: the acceptance rate of a whole draft is low in every long draft or tree.
    """
    name, total, figures = result.ran.name, result.total, result.figures
    is_adaptive = bool((result.ran.speculative_config or {}).get("adaptive_draft_length"))
    if not result.loads and total.felt_speed_up < SLOWER:
        yield _slower(name, total, is_adaptive)
    for row, own in figures.items():
        if own.felt_speed_up < SLOWER and (result.loads or len(figures) > 1):
            yield _slower(f"{name}, {row},", own, is_adaptive)
    if total.num_preempted or total.num_plain_preempted:
        yield (
            f"requests lost their KV blocks {total.num_preempted} times with {name} and {total.num_plain_preempted} "
            f"times without, and started over: try more num_kv_blocks or fewer requests at once"
        )
    if not total.drafts.num_drafts:
        see = "give num_speculative_tokens to see what it drafts where that does not pay, or " if is_adaptive else ""
        yield f"{name} drafted nothing: {see}try another method for these prompts"
    elif not result.ran.is_synthetic:
        yield from _acceptance(total, result.ran.num_speculative_tokens, is_adaptive)


def _slower(what: str, figures: Figures, is_adaptive: bool) -> str:
    """Return a line about figures that are slower than plain decoding, with the larger cost and a remedy. is_adaptive:
    the engine decides how much is drafted, and a number would end that."""
    costs, line = figures.costs, f"{what} is slower than plain decoding: {figures.felt_speed_up:.2f}x"
    if costs is None:
        return f"{line}. There was no step without prefill: try a higher --max-tokens"
    if is_adaptive:
        return (
            f"{line}. The engine drafts only what it expects to pay: try longer or more completions, until it has "
            f"measured that, or plain decoding for these prompts"
        )
    if costs.drafting > costs.verification - 1:
        return (
            f"{line}. Drafting costs {costs.drafting:.2f} forward passes a step: try a lower num_speculative_tokens, a "
            f"smaller draft, or a method without a model"
        )
    return (
        f"{line}. Verification costs {costs.verification:.2f} forward passes of plain decoding: try a lower "
        f"num_speculative_tokens, or set disable_by_batch_size"
    )


def _acceptance(total: Figures, num_speculative_tokens: int, is_adaptive: bool) -> Iterator[str]:
    rates = total.drafts.acceptance_rate_per_pos or [0.0]
    if rates[0] < LOW_RATE:
        yield (
            f"only {rates[0]:.0%} of the drafts begin with a token that is accepted: try another method or draft for "
            "these prompts"
        )
    elif not is_adaptive and len(rates) == num_speculative_tokens and rates[-1] > HIGH_RATE * rates[0]:
        yield (
            f"the last position is accepted almost as often as the first one ({rates[-1]:.0%}, {rates[0]:.0%}): try a "
            "higher num_speculative_tokens"
        )
