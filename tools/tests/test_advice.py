"""What `spec-decode bench` advises: each line for its cause, and none where nothing is wrong."""

from __future__ import annotations

import attrs
import pytest

from specdec_core.contracts.report import StepReport
from specdec_tools.advice import advice
from specdec_tools.compare import Comparison, Run
from specdec_tools.configurations import Ran
from specdec_tools.figures import Figures
from specdec_tools.results import Result

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
            ["mine is slower than plain decoding: 0.50x. Drafting costs 0.50 forward passes a step: try a lower"],
        ),
        (
            6.0,
            [step(0.5, 1.6), step(0.5, 1.6)],
            ["mine is slower than plain decoding: 0.50x. Verification costs 1.60 forward passes of plain decoding"],
        ),
        (2.0, [step(num_accepted=None)], ["mine drafted nothing"]),
        (2.0, [step(num_accepted=0), step(num_accepted=0), step()], ["only 33% of the drafts begin with a token"]),
        (2.0, [step(num_accepted=0), step()], []),
        (2.0, [step(num_accepted=2)] * 4, ["the last position is accepted almost as often as the first one"]),
    ],
)
def test_advice(seconds: float, steps: list[StepReport], says: list[str]) -> None:
    found = list(advice(result({"t": compared(seconds, steps)})))
    assert [line[: len(text)] for line, text in zip(found, says, strict=True)] == says


PLAIN = StepReport(num_decode_requests=1, num_output_tokens=1, target_s=1.0, output_per_request={"r": 1})


def compared(seconds: float, steps: list[StepReport], *, is_open: bool = False) -> Comparison:
    def run(seconds: float, reports: list[StepReport]) -> Run:
        return Run(seconds, ((1, 2),), tuple(reports), ("r",), tuple(seconds for _ in reports))

    return Comparison("t", (run(PLAIN_S, [PLAIN]),), (run(seconds, steps),), is_open=is_open)


def result(rows: dict[str, Comparison], *, is_load: bool = False, is_synthetic: bool = False) -> Result:
    ran = Ran("mine", is_synthetic, "m", "float32", "cpu", 0.0, "batches of 1", 8, 2, {}, {})
    return Result(ran, {row: [each] for row, each in rows.items()}, {row: {} for row in rows} if is_load else {})


FAST, SLOW = (2.0, [step(num_accepted=2), step()]), (6.0, [step(0.5), step(0.5)])


def test_what_may_be_chance_is_not_called_slower() -> None:
    assert not [line for line in advice(result({"t": compared(3.03, SLOW[1])})) if "slower" in line]
    assert [line for line in advice(result({"t": compared(3.2, SLOW[1])})) if "slower" in line]


def test_where_the_engine_decides_no_number_is_advised() -> None:
    given = result({"t": compared(6.0, [step(0.5, num_accepted=2)] * 4)})
    adaptive = attrs.evolve(given, ran=attrs.evolve(given.ran, speculative_config={"adaptive_draft_length": True}))
    assert any("num_speculative_tokens" in line for line in advice(given))
    (line,) = advice(adaptive)
    assert "The engine drafts only what it expects to pay" in line


def test_each_slower_group_has_a_line() -> None:
    """Of 4 tokens in all, plain decoding takes 3 s twice and speculation 2 s and 6 s: slower on the whole, too."""
    found = list(advice(result({"one": compared(*FAST), "two": compared(*SLOW)})))
    assert [line.partition(": try")[0] for line in found] == [
        "mine is slower than plain decoding: 0.75x. Drafting costs 0.30 forward passes a step",
        "mine, two, is slower than plain decoding: 0.50x. Drafting costs 0.50 forward passes a step",
    ]


def test_each_slower_load_has_a_line() -> None:
    loads = {"1 at once": compared(*FAST), "4 at once": compared(*SLOW)}
    (line,) = advice(result(loads, is_load=True))
    assert line.startswith("mine, 4 at once, is slower than plain decoding: 0.50x. Drafting costs 0.50")


def test_at_a_given_rate_a_users_wait_counts() -> None:
    """The run takes as long with speculation, but its request, of which all tokens come at 6 s, came at 3 s before."""
    late = [attrs.evolve(each, output_per_request={"r": 1}) for each in SLOW[1]]
    plain, drafted = compared(6.0, late, is_open=True).plain[0], compared(6.0, late, is_open=True).speculative[0]
    same = Comparison("t", (attrs.evolve(plain, seconds=6.0),), (drafted,), is_open=True)
    assert Figures.of(same).speed_up == 1.0
    (line,) = advice(result({"2/s": same}, is_load=True))
    assert line.startswith("mine, 2/s, is slower than plain decoding: 0.50x.")


def test_without_steps_that_only_decode() -> None:
    only = [StepReport(num_prefill_tokens=3, num_output_tokens=2, num_draft_tokens=1, accepted_per_request={"r": 1})]
    (line,) = advice(result({"t": compared(6.0, only)}))
    assert line == (
        "mine is slower than plain decoding: 0.50x. There was no step without prefill: try a higher --max-tokens"
    )


def test_synthetic_acceptance_is_not_judged() -> None:
    rejected = compared(2.0, [step(num_accepted=0)] * 3)
    assert list(advice(result({"t": rejected}, is_synthetic=True))) == []
    assert len(list(advice(result({"t": rejected})))) == 1


def test_preemptions_are_told() -> None:
    steps = [attrs.evolve(step(), num_preempted=2), step(), attrs.evolve(step(), num_preempted=1)]
    (line,) = advice(result({"t": compared(2.0, steps)}))
    assert line.startswith("requests lost their KV blocks 3 times with mine and 0 times without")
