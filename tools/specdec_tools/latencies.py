"""How long a user waits: time to first token (TTFT), inter-token latency (ITL) and end-to-end latency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from specdec_tools.compare import Run

PERCENTILES = (50, 95, 99)


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """Return for each of `PERCENTILES` the least of these values that is not below that many percent of them."""
    ordered = sorted(values)
    return tuple(ordered[ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES)


@frozen
class Latencies:
    """Seconds of the completions of several runs, in no order.

    time_to_first_token: from arrival to the first token, of each completion.
    inter_token: between two steps that gave a completion tokens, of all completions. An accepted draft gives several
        tokens at once.
    end_to_end: from arrival to the last token, of each completion.
    tokens_per_s: output tokens divided by these seconds, of each completion.
    """

    time_to_first_token: tuple[float, ...]
    inter_token: tuple[float, ...]
    end_to_end: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Latencies:
        served = [(times, num_tokens) for run in runs for times, num_tokens in _token_times(run) if times]
        return cls(
            time_to_first_token=tuple(times[0] for times, _ in served),
            inter_token=tuple(b - a for times, _ in served for a, b in pairwise(times)),
            end_to_end=tuple(times[-1] for times, _ in served),
            tokens_per_s=tuple(num_tokens / times[-1] for times, num_tokens in served),
        )

    @property
    def user_tokens_per_s(self) -> float:
        """Output tokens per second that a user gets, waiting for the first one included: the median over completions; 0
        without any."""
        return median(self.tokens_per_s) if self.tokens_per_s else 0.0

    def percentiles(self) -> Mapping[str, tuple[float, ...] | None]:
        """{name of the latency: its `PERCENTILES` in seconds, or None if there is no value}."""
        waits = {
            "time_to_first_token": self.time_to_first_token,
            "inter_token": self.inter_token,
            "end_to_end": self.end_to_end,
        }
        return {name: percentiles(each) if each else None for name, each in waits.items()}


def _token_times(run: Run) -> Iterator[tuple[list[float], int]]:
    """Yield for each completion the seconds from its arrival to the end of each step that gave it tokens, and the
    number of its tokens."""
    ends: dict[str, list[float]] = {request_id: [] for request_id in run.request_ids}
    for report, end in zip(run.reports, run.report_times_s, strict=True):
        for request_id, num_tokens in report.output_per_request.items():
            if num_tokens and request_id in ends:
                ends[request_id].append(end)
    arrivals = run.arrivals_s or (0.0,) * len(run.request_ids)
    for request_id, arrival, tokens in zip(run.request_ids, arrivals, run.token_ids, strict=True):
        yield [end - arrival for end in ends[request_id]], len(tokens)
