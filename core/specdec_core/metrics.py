"""Counters over the life of an engine, with vLLM's names behind a prefix."""

from __future__ import annotations

from attrs import frozen

from specdec_core.types import StepReport


@frozen
class Counter:
    """A number that only grows."""

    name: str
    value: int


@frozen
class Vector:
    """A number per draft position."""

    name: str
    values: list[int]

    @property
    def value(self) -> list[int]:
        return self.values


class Metrics:
    """Sums up step reports. Mean acceptance length = 1 + num_accepted_tokens / num_drafts."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = self._num_draft_tokens = self._num_accepted = self._num_preempted = 0
        self._accepted_per_pos = [0] * num_speculative_tokens

    def update(self, report: StepReport) -> None:
        self._num_drafts += len(report.accepted_per_request)
        self._num_draft_tokens += report.num_draft_tokens
        self._num_accepted += report.num_accepted
        self._num_preempted += report.num_preempted
        for num_accepted in report.accepted_per_request.values():
            for position in range(num_accepted):
                self._accepted_per_pos[position] += 1

    def read(self) -> list[Counter | Vector]:
        prefix = "specdec:spec_decode_"
        return [
            Counter(f"{prefix}num_drafts", self._num_drafts),
            Counter(f"{prefix}num_draft_tokens", self._num_draft_tokens),
            Counter(f"{prefix}num_accepted_tokens", self._num_accepted),
            Vector(f"{prefix}num_accepted_tokens_per_pos", list(self._accepted_per_pos)),
            Counter("specdec:num_preemptions", self._num_preempted),
        ]
