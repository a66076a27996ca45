"""Finds out whether drafting makes an engine slower, where the number of draft tokens is fixed, and says so once."""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain
from statistics import fmean, median

from attrs import define, field

from specdec_core.contracts.report import StepReport

logger = logging.getLogger(__name__)

NUM_STEPS, NUM_PLAIN = 64, 5
"""Steps that a comparison takes: with drafting, and without any draft token."""
NUM_BETWEEN = 8
"""From one step in which nothing is drafted to the next one."""
MOST_TOKENS = 2.5
"""No step goes without drafts where a request gets more output tokens in a step: that is hardly a loss."""
LOSS = 0.95
"""A smaller share of plain decoding's tokens per second is a loss. Times vary by less."""


@define
class _Steps:
    """The newest steps with about the same number of requests."""

    tokens: deque[float] = field(factory=lambda: deque(maxlen=NUM_STEPS))  # output tokens per request
    seconds: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=NUM_STEPS))  # by number of draft tokens
    plain: deque[float] = field(factory=lambda: deque(maxlen=NUM_STEPS))  # seconds without draft tokens and drafting
    since_plain: int = 0
    is_compared: bool = False

    @property
    def speed_up(self) -> float:
        """Tokens per second as a multiple of plain decoding's."""
        similar: dict[int, list[float]] = {}
        for number, seconds in self.seconds:
            similar.setdefault(number.bit_length(), []).append(seconds)
        # Medians on both sides: a slow step of the machine counts on neither.
        drafted_s = fmean(chain.from_iterable([median(each)] * len(each) for each in similar.values()))
        return fmean(self.tokens) / drafted_s * median(self.plain)


class LossWatch:
    """Compares steps with drafting to ones without, and logs a warning if drafting is a loss.

    Only steps without prefill count, and only ones of about the same number of requests (up to a factor of 2) are
    compared. If few draft tokens are accepted, nothing is drafted in up to `NUM_PLAIN` steps, to measure these.

    advice: what the user can do, for the warning.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._steps: dict[int, _Steps] = {}
        self._has_warned = False

    def skips(self, num_requests: int) -> bool:
        """Whether nothing is drafted in this step, which has no prefill, for the sake of the comparison. That does not
        depend on measured times: two runs of a script draft the same."""
        steps = self._steps.get(num_requests.bit_length())
        return (
            steps is not None
            and not steps.is_compared
            and len(steps.tokens) == NUM_STEPS
            and steps.since_plain >= NUM_BETWEEN
            and fmean(steps.tokens) <= MOST_TOKENS
        )

    def add(self, report: StepReport, *, has_asked: bool) -> None:
        """Count a step. Warns if that shows a loss. has_asked: whether a proposer was asked for a draft."""
        number = report.num_decode_requests
        if report.num_prefill_tokens or not number:
            return
        steps = self._steps.setdefault(number.bit_length(), _Steps())
        steps.since_plain += 1
        if not report.num_nodes:
            steps.plain.append(report.target_s + report.other_s)
            steps.since_plain = 0
        if has_asked:
            steps.tokens.append(report.num_output_tokens / number)
            seconds = report.draft_s + report.target_s + report.other_s
            steps.seconds.append((report.num_nodes, seconds))
        if steps.is_compared or len(steps.tokens) < NUM_STEPS or len(steps.plain) < NUM_PLAIN:
            return
        steps.is_compared = True
        if steps.speed_up < LOSS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "specdec: drafting is a loss here, at a batch size of %d: %.2f of plain decoding's tokens per second, "
                "and %.1f output tokens of a request in a step. %s",
                number,
                steps.speed_up,
                fmean(steps.tokens),
                self._advice,
            )
