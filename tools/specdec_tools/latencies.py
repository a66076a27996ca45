"""How long a user waits: time to first token (TTFT), inter-token latency (ITL) and end-to-end latency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from attrs import asdict, frozen

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

    time_to_first_token: from submission to the first token, of each completion.
    inter_token: between two steps that gave a completion tokens, of all completions. An accepted draft gives several
        tokens at once.
    end_to_end: from submission to the last token, of each completion.
    """

    time_to_first_token: tuple[float, ...]
    inter_token: tuple[float, ...]
    end_to_end: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Latencies:
        times = [times for run in runs for times in _token_times(run) if times]
        return cls(
            time_to_first_token=tuple(each[0] for each in times),
            inter_token=tuple(b - a for each in times for a, b in pairwise(each)),
            end_to_end=tuple(each[-1] for each in times),
        )

    def percentiles(self) -> Mapping[str, tuple[float, ...] | None]:
        """{name of the latency: its `PERCENTILES` in seconds, or None if there is no value}."""
        return {name: percentiles(each) if each else None for name, each in asdict(self).items()}


def _token_times(run: Run) -> Iterator[list[float]]:
    """Yield for each completion the seconds from submission to the end of each step that gave it tokens."""
    for request_id in run.request_ids:
        ends = zip(run.reports, run.report_times_s, strict=True)
        yield [end for report, end in ends if report.output_per_request.get(request_id)]
