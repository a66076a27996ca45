"""What `spec-decode bench` advises: each line for its cause, and none where nothing is wrong."""

from __future__ import annotations

import pytest

from specdec_core.contracts.report import StepReport
from specdec_tools.advice import advice
from specdec_tools.compare import Comparison, Run
from specdec_tools.figures import Figures

PLAIN_S = 3.0


def step(draft_s: float = 0.1, target_s: float = 1.1, *, num_accepted: int | None = 1) -> StepReport:
    """A step of one request; a plain forward pass takes 1 s. num_accepted: of two draft tokens; None: no draft."""
    accepted = {} if num_accepted is None else {"r": num_accepted}
    return StepReport(
        num_decode_requests=1,
        num_output_tokens=1 + (num_accepted or 0),
        num_draft_tokens=2 * len(accepted),
        num_accepted=num_accepted or 0,
        accepted_per_request=accepted,
        draft_s=draft_s,
        target_s=target_s,
    )


@pytest.mark.parametrize(
    ("seconds", "steps", "says"),
    [
        (2.0, [step(num_accepted=2), step(), step()], []),
        (3.0, [step(num_accepted=2), step(), step()], []),
        (
            6.0,
            [step(0.5), step(0.5)],
            ["mine is slower than plain decoding: 0.50x", "drafting costs 0.50 forward passes"],
        ),
        (
            6.0,
            [step(0.5, 1.6), step(0.5, 1.6)],
            ["mine is slower than plain decoding: 0.50x", "verification costs 1.60 forward passes"],
        ),
        (2.0, [step(num_accepted=None)], ["mine drafted nothing"]),
        (2.0, [step(num_accepted=0), step(num_accepted=0), step()], ["only 33% of the drafts begin with a token"]),
        (2.0, [step(num_accepted=0), step()], []),
        (2.0, [step(num_accepted=2)] * 4, ["the last position is accepted almost as often as the first one"]),
    ],
)
def test_advice(seconds: float, steps: list[StepReport], says: list[str]) -> None:
    def run(seconds: float, reports: list[StepReport]) -> Run:
        return Run(seconds, ((1, 2),), tuple(reports), ("r",), tuple(range(len(reports))))

    plain = [StepReport(num_decode_requests=1, num_output_tokens=1, target_s=1.0)]
    total = Figures.of(Comparison("t", (run(PLAIN_S, plain),), (run(seconds, steps),)))
    found = list(advice("mine", total, 2))
    assert [line[: len(text)] for line, text in zip(found, says, strict=True)] == says
