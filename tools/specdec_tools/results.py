"""The results of one configuration, as `spec-decode bench` reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import frozen

from specdec_tools.compare import Comparison
from specdec_tools.configurations import Ran
from specdec_tools.figures import Figures


@frozen(slots=False)
class Result:
    """What was run, and its comparisons with plain decoding.

    rows: {group of prompts, or load: comparisons of its batches, or the one of the load}.
    loads: {load: its option}; empty: prompts were run in batches.
    """

    ran: Ran
    rows: Mapping[str, Sequence[Comparison]]
    loads: Mapping[str, Mapping[str, Any]]

    @cached_property
    def figures(self) -> dict[str, Figures]:
        return {row: Figures.of(*comparisons) for row, comparisons in self.rows.items()}

    @cached_property
    def total(self) -> Figures:
        return Figures.of(*(comparison for comparisons in self.rows.values() for comparison in comparisons))
