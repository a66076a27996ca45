"""What `spec-decode bench` advises to change."""

from __future__ import annotations

from collections.abc import Iterator

from specdec_tools.figures import Figures

LOW_RATE = 0.5
HIGH_RATE = 0.8


def advice(method: str, total: Figures, num_speculative_tokens: int) -> Iterator[str]:
    """Yield what the figures of all prompts say against the settings, one line each, with what to try instead.

    method: the speculative method, to be named.
    num_speculative_tokens: the engine's, which is the last position of a chain.

    Rates are those of single positions: the acceptance rate of a whole draft is low in every long draft or tree.
    """
    rates, costs = total.drafts.acceptance_rate_per_pos or [0.0], total.costs
    if total.speed_up < 1:
        yield f"{method} is slower than plain decoding: {total.speed_up:.2f}x"
        if costs is not None and costs.drafting > costs.verification - 1:
            yield (
                f"drafting costs {costs.drafting:.2f} forward passes a step: try a lower num_speculative_tokens, "
                "a smaller draft, or a method without a model"
            )
        elif costs is not None:
            yield (
                f"verification costs {costs.verification:.2f} forward passes of plain decoding: try a lower "
                "num_speculative_tokens, or set disable_by_batch_size"
            )
    if not total.drafts.num_drafts:
        yield f"{method} drafted nothing: try another method for these prompts"
    elif rates[0] < LOW_RATE:
        yield (
            f"only {rates[0]:.0%} of the drafts begin with a token that is accepted: try another method or draft for "
            "these prompts"
        )
    elif len(rates) == num_speculative_tokens and rates[-1] > HIGH_RATE * rates[0]:
        yield (
            f"the last position is accepted almost as often as the first one ({rates[-1]:.0%}, {rates[0]:.0%}): try a "
            "higher num_speculative_tokens"
        )
