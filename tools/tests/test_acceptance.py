"""Acceptance by context length and by group, and vLLM's names for it, from hand-made reports."""

from __future__ import annotations

import pytest

from specdec_core import DraftCounts
from specdec_core.contracts.report import StepReport
from specdec_tools.acceptance import by_context, by_group, context_start, context_title, vllm_fields
from specdec_tools.compare import Comparison, Run

STEPS = [
    ({"r": 1, "s": 1}, {}),  # of prefill
    ({"r": 3, "s": 1}, {"r": 2, "s": 0}),  # r has 126 tokens before and 129 after, s has 256 before
    ({"r": 2}, {"r": 1}),
    ({"s": 4}, {"s": 3}),
    ({"s": 1}, {}),  # no draft
]


def run(*prompt_lens: int) -> Run:
    reports = tuple(StepReport(output_per_request=output, accepted_per_request=drafted) for output, drafted in STEPS)
    prompts = tuple((0,) * length for length in prompt_lens)
    return Run(1.0, ((1,) * 6, (1,) * 7), reports, ("r", "s"), tuple(range(len(STEPS))), prompts)


@pytest.mark.parametrize(
    ("num_tokens", "start", "title"),
    [
        (0, 0, "under 128"),
        (127, 0, "under 128"),
        (128, 128, "128 to 255"),
        (255, 128, "128 to 255"),
        (256, 256, "256 to 511"),
        (5000, 4096, "4096 to 8191"),
    ],
)
def test_intervals(num_tokens: int, start: int, title: str) -> None:
    assert (context_start(num_tokens), context_title(start)) == (start, title)


def test_by_context() -> None:
    assert by_context([run(125, 255)]) == {
        0: DraftCounts(1, 0, 2, [1, 1]),
        128: DraftCounts(1, 0, 1, [1]),
        256: DraftCounts(2, 0, 3, [1, 1, 1]),
    }
    assert by_context([run()]) == {0: DraftCounts(4, 0, 6, [3, 2, 1])}


def test_by_group() -> None:
    several = [Comparison("t", (), (run(1, 1), run(1, 1)), ("edit", "write")), Comparison("t", (), (run(1, 1),))]
    assert by_group(several) == {
        "edit": DraftCounts(4, 0, 6, [4, 2]),
        "write": DraftCounts(4, 0, 6, [2, 2, 2]),
    }


def test_names_and_units_of_vllm() -> None:
    """5 drafts of 18 tokens, of which 9 were accepted: in percent, as vLLM has it."""
    assert vllm_fields(DraftCounts(5, 18, 9, [5, 3, 1])) == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.8,
        "spec_decode_num_drafts": 5,
        "spec_decode_draft_tokens": 18,
        "spec_decode_accepted_tokens": 9,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.6, 0.2],
    }
    assert "spec_decode_acceptance_rate" not in vllm_fields(DraftCounts(5, 0, 9, [5, 3, 1]))
