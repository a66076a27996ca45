"""Metrics of speculation, such as the acceptance rate: per request, over the life of an engine, and in the log.

To add a metric, add a field to `Totals`, a line to `Totals.add` and one to `Metrics.read`. If a step must count
something new for it, add a field to `contracts/report.py` and its value in `engine/step_report.py`. For a gauge, add a
field to `Load`, its value in `Engine.load` and a line to `Metrics._gauges`. Proposers have metrics of their own
(`Proposer.metrics`), which need no change here.
"""

from __future__ import annotations

import logging
from collections import Counter as CounterOf
from collections.abc import Callable, Sequence
from itertools import zip_longest

from attrs import define, evolve, field, frozen

from specdec_core.contracts.report import StepReport
from specdec_core.engine.histogram import Histogram, Times
from specdec_core.errors import PluginError

LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


@frozen
class Counter:
    """A metric whose value only grows, such as the number of draft tokens."""

    name: str
    value: int | float


@frozen
class Vector:
    """A metric with one count per draft position (in a tree, per depth)."""

    name: str
    values: list[int]

    @property
    def value(self) -> list[int]:
        return self.values


@frozen
class Gauge:
    """A metric that rises and falls, such as the number of running requests."""

    name: str
    value: int | float


Metric = Counter | Vector | Gauge | Histogram


@frozen
class Load:
    """How busy an engine is at one moment.

    kv_usage: the share of the KV cache's blocks that requests hold, from 0 to 1.
    of_proposers: the proposers' own metrics, such as "suffix_cache_bytes".
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    of_proposers: Sequence[Counter | Gauge] = ()

    def __str__(self) -> str:
        parts = [f"{self.num_running} running and {self.num_waiting} waiting requests"]
        parts.append(f"{self.kv_usage:.0%} of the KV cache in use")
        parts += [f"{metric.name} {metric.value:,}" for metric in self.of_proposers]
        return ", ".join(parts)


@define
class DraftCounts:
    """Counts of the drafts of one or more requests, and of their draft tokens.

    accepted_per_pos: entry i is the number of drafts with at least i + 1 accepted tokens. In a tree, i + 1 is a depth.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: list[int] = field(factory=list)

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one more draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        self.accepted_per_pos += [0] * (num_accepted - len(self.accepted_per_pos))
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        per_pos = zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            [sum(both) for both in per_pos],
        )

    @property
    def acceptance_length(self) -> float:
        """Mean of 1 + accepted draft tokens over verified drafts (1.0 without drafts)."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """The fraction of draft tokens that were accepted (0.0 without any)."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """For each draft position, the fraction of all drafts whose token there was accepted. In trees, a position is a
        depth: entry i is the fraction of drafts of which a path of i + 1 or more nodes was accepted."""
        return [num_accepted / self.num_drafts for num_accepted in self.accepted_per_pos]


@define
class Totals:
    """Sums of the values in step reports."""

    drafts: DraftCounts = field(factory=DraftCounts)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preempted: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    steps_per_verifier: CounterOf[str] = field(factory=CounterOf)
    first_token: Times = field(factory=Times)
    inter_token: Times = field(factory=Times)
    whole_request: Times = field(factory=Times)

    def add(self, report: StepReport, step_s: float) -> None:
        for num_accepted in report.accepted_per_request.values():
            self.drafts.add(0, num_accepted)
        self.drafts.num_draft_tokens += report.num_draft_tokens
        self.num_prompt_tokens += report.num_prompt_tokens
        self.num_output_tokens += report.num_output_tokens
        self.num_preempted += report.num_preempted
        self.num_queried_tokens += report.num_queried_tokens
        self.num_cached_tokens += report.num_cached_tokens
        self.draft_s += report.draft_s
        self.target_s += report.target_s
        self.verify_s += report.verify_s
        self.step_s += step_s
        self.first_token.add(report.first_token_s)
        self.inter_token.add(report.inter_token_s)
        self.whole_request.add(report.whole_request_s)
        if report.verifier:
            self.steps_per_verifier[report.verifier] += 1

    @property
    def forward_s(self) -> float:
        return self.target_s - self.verify_s

    @property
    def other_s(self) -> float:
        """Seconds of scheduling, of emitting tokens, and of whatever else a step does."""
        return max(0.0, self.step_s - self.draft_s - self.target_s)

    def log_line(self) -> str:
        """One line for the log. Rates are per second of step time; time between steps does not count."""
        drafts = self.drafts
        line = (
            f"{self.num_prompt_tokens / self.step_s:.1f} prompt and {self.num_output_tokens / self.step_s:.1f} output "
            f"tokens/s"
        )
        drafted = (
            f"; drafted {drafts.num_draft_tokens / self.step_s:.1f} and accepted "
            f"{drafts.num_accepted / self.step_s:.1f} tokens/s"
        )
        return line + (drafted + self._acceptance() if drafts.num_drafts else "") + self._times()

    def last_line(self) -> str:
        """The log's last line when the engine is closed: the sums themselves."""
        drafts = self.drafts
        line = (
            f"closed after {self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens in "
            f"{self.step_s:.1f} s of steps"
        )
        drafted = f"; {drafts.num_drafts} drafts, {drafts.num_accepted} of {drafts.num_draft_tokens} tokens accepted"
        return line + (drafted + self._acceptance() if drafts.num_drafts else "") + self._times()

    def _acceptance(self) -> str:
        drafts = self.drafts
        per_pos = ", ".join(f"{rate:.2f}" for rate in drafts.acceptance_rate_per_pos)
        return (
            f"; acceptance rate {drafts.acceptance_rate:.2f}, per position {per_pos or 'none'}; mean acceptance length "
            f"{drafts.acceptance_length:.2f}"
        )

    def _times(self) -> str:
        return (
            f"; {self.draft_s:.2f} s drafting, {self.forward_s:.2f} s in forward passes, {self.verify_s:.2f} s "
            f"verifying, {self.other_s:.2f} s for the rest"
        )


class Metrics:
    """Metrics of an engine, summed over its steps.

    num_speculative_tokens: the number of values in a metric that has one value per draft position.
    prefix: put before every metric's name, with a colon between them.
    log_interval_s: seconds of step time between two lines in the log; None: no lines.
    """

    def __init__(
        self, num_speculative_tokens: int, *, prefix: str = "vllm", log_interval_s: float | None = LOG_INTERVAL_S
    ) -> None:
        self._num_positions = num_speculative_tokens
        self._prefix = prefix
        self._log_interval_s = log_interval_s
        self._totals = Totals()
        self._since_logged = Totals()

    def update(self, report: StepReport, step_s: float, load: Callable[[], Load] | None = None) -> None:
        """Add a step's report. Writes a line to the log if log_interval_s seconds of step time have passed since the
        last line.

        step_s: the step's whole duration in seconds.
        load: returns how busy the engine is now, for that line; None: the line does not have it.
        """
        self._totals.add(report, step_s)
        if self._log_interval_s is None:
            return
        self._since_logged.add(report, step_s)
        if self._since_logged.step_s >= self._log_interval_s:
            line, self._since_logged = self._since_logged.log_line(), Totals()
            logger.info("specdec: %s%s", line, "" if load is None else _described(load))

    def close(self) -> None:
        """Write the last line to the log, with the sums of all steps, however little time they took. Writes nothing if
        there was no step."""
        if self._log_interval_s is not None and self._totals.step_s:
            logger.info("specdec: %s", self._totals.last_line())

    def read(self, load: Load | None = None) -> list[Metric]:
        """Return all metrics. load: how busy the engine is now; None: without the gauges of that."""
        totals, drafts = self._totals, self._totals.drafts
        per_pos = drafts.accepted_per_pos + [0] * (self._num_positions - len(drafts.accepted_per_pos))
        engine, speculation = f"{self._prefix}:", f"{self._prefix}:spec_decode_"
        of_proposers = () if load is None else load.of_proposers
        gauges = () if load is None else self._gauges(load)
        return [
            Counter(f"{speculation}num_drafts", drafts.num_drafts),
            Counter(f"{speculation}num_draft_tokens", drafts.num_draft_tokens),
            Counter(f"{speculation}num_accepted_tokens", drafts.num_accepted),
            Vector(f"{speculation}num_accepted_tokens_per_pos", per_pos),
            Counter(f"{speculation}draft_seconds", totals.draft_s),
            Counter(f"{speculation}target_seconds", totals.target_s),
            Counter(f"{speculation}forward_seconds", totals.forward_s),
            Counter(f"{speculation}verify_seconds", totals.verify_s),
            Counter(f"{speculation}other_seconds", totals.other_s),
            *(
                Counter(f"{speculation}num_steps_verified_by_{name}", n)
                for name, n in sorted(totals.steps_per_verifier.items())
            ),
            *(evolve(metric, name=f"{speculation}{metric.name}") for metric in of_proposers),
            Counter(f"{engine}prompt_tokens", totals.num_prompt_tokens),
            Counter(f"{engine}generation_tokens", totals.num_output_tokens),
            Counter(f"{engine}num_preemptions", totals.num_preempted),
            Counter(f"{engine}prefix_cache_queries", totals.num_queried_tokens),
            Counter(f"{engine}prefix_cache_hits", totals.num_cached_tokens),
            Counter(f"{engine}step_seconds", totals.step_s),
            totals.first_token.histogram(f"{engine}time_to_first_token_seconds"),
            totals.inter_token.histogram(f"{engine}inter_token_latency_seconds"),
            totals.whole_request.histogram(f"{engine}e2e_request_latency_seconds"),
            *gauges,
        ]

    def _gauges(self, load: Load) -> tuple[Gauge, ...]:
        return (
            Gauge(f"{self._prefix}:num_requests_running", load.num_running),
            Gauge(f"{self._prefix}:num_requests_waiting", load.num_waiting),
            Gauge(f"{self._prefix}:kv_cache_usage_perc", load.kv_usage),
        )


def _described(load: Callable[[], Load]) -> str:
    try:
        return f"; {load()}"
    except PluginError as error:  # a proposer's metrics: no reason to end what runs
        logger.warning("specdec: %s", error)
        return ""
