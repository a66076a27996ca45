"""What `spec-decode bench` computes from steps: their costs in plain forward passes, and latencies."""

from __future__ import annotations

import attrs
import pytest

from specdec_core.contracts.report import StepReport
from specdec_tools.compare import Run
from specdec_tools.latencies import Latencies, percentiles
from specdec_tools.step_costs import Decoding, StepCosts

PREFILL = StepReport(num_prefill_tokens=9, num_decode_requests=1, num_output_tokens=2, target_s=70.0, draft_s=5.0)
PLAIN = StepReport(num_decode_requests=2, num_output_tokens=2, target_s=2.0)
DRAFTED = StepReport(
    num_decode_requests=2, num_draft_tokens=8, num_accepted=4, num_output_tokens=5, draft_s=1.0, target_s=3.0,
    accepted_per_request={"r": 1, "s": 3},
)  # fmt: skip
"""One output ends at an accepted token, so the target adds none."""
WITHOUT = StepReport(num_decode_requests=2, num_output_tokens=2, draft_s=0.2, target_s=2.0)


def check_costs() -> None:
    """Two steps give 4 requests 7 tokens. They cost 1.2 s of drafting and 5 s of forward passes, of which a plain one
    takes 2 s."""
    plain = Decoding.of([PREFILL, PLAIN, PLAIN], 80.0, 5)
    costs = StepCosts.of(plain, Decoding.of([PREFILL, DRAFTED, WITHOUT], 82.0, 8))
    assert costs.block_efficiency == 7 / 4
    assert (costs.drafting, costs.verification) == (pytest.approx(0.3), pytest.approx(1.25))
    assert costs.draft_token == pytest.approx(0.3 / 2), "8 draft tokens of 4 requests"
    assert costs.token == pytest.approx(1.55 / 1.75)
    assert costs.speed_up == pytest.approx(1.75 / 1.55)
    assert costs.memory_bound_speed_up == pytest.approx(1.75 / (1 + 0.3))
    assert costs.tokens_per_forward_pass == 7 / 2, "two forward passes"
    assert costs.drafted_share == 2 / 4, "of 4 forward passes of a request, 2 had a draft"
    assert (costs.acceptance_length, costs.draft_len) == (1 + 4 / 2, 8 / 2)
    assert costs.memory_bound_speed_up_of_drafts == pytest.approx(3 / (0.15 * 4 + 1)), "tau / (c * k + 1)"


def test_costs() -> None:
    check_costs()


def test_steps_without_drafts_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Decoding.of
    monkeypatch.setattr(Decoding, "of", lambda reports, s, n: of([each for each in reports if each != WITHOUT], s, n))
    with pytest.raises(AssertionError):
        check_costs()


def test_plain_decoding_costs_one_forward_pass() -> None:
    plain = Decoding.of([PLAIN], 2.0, 2)
    costs = StepCosts.of(plain, plain)
    assert (costs.block_efficiency, costs.drafting, costs.verification) == (1.0, 0.0, 1.0)
    assert (costs.draft_token, costs.memory_bound_speed_up_of_drafts) == (None, None)
    assert (costs.tokens_per_forward_pass, costs.drafted_share) == (2.0, 0.0)


def test_percentiles() -> None:
    assert percentiles(range(100, 0, -1)) == (50, 95, 99)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([1.0, 2.0]) == (1.0, 2.0, 2.0)


def run(times_s: tuple[float, ...] = (1.0, 1.5, 4.0)) -> Run:
    """A run of two completions, of which one gets tokens in all steps and the other one in two."""
    outputs = ({"r": 1}, {"r": 3, "s": 1}, {"r": 1, "s": 2})
    reports = tuple(
        StepReport(num_decode_requests=2, num_output_tokens=sum(each.values()), target_s=1.0, output_per_request=each)
        for each in outputs
    )
    return Run(4.0, ((1,) * 5, (2,) * 3), reports, ("r", "s"), times_s)


def test_latencies() -> None:
    found = Latencies.of([run(), run((10.0, 20.0, 30.0))])
    assert sorted(found.time_to_first_token) == [1.0, 1.5, 10.0, 20.0]
    assert sorted(found.inter_token) == [0.5, 2.5, 2.5, 10.0, 10.0, 10.0]
    assert sorted(found.end_to_end) == [4.0, 4.0, 30.0, 30.0]
    assert found.percentiles()["end_to_end"] == (4.0, 30.0, 30.0)
    assert sorted(found.tokens_per_s) == [3 / 30, 5 / 30, 3 / 4, 5 / 4]
    assert found.user_tokens_per_s == pytest.approx((5 / 30 + 3 / 4) / 2), "the median"
    nothing = Latencies.of([])
    assert nothing.percentiles() == {"time_to_first_token": None, "inter_token": None, "end_to_end": None}
    assert nothing.user_tokens_per_s == 0.0


def test_latencies_count_from_the_arrival() -> None:
    """One request arrives at 0.25 s and the other one at 1 s."""
    found = Latencies.of([attrs.evolve(run(), arrivals_s=(0.25, 1.0))])
    assert (found.time_to_first_token, found.end_to_end) == ((0.75, 0.5), (3.75, 3.0))
    assert (found.inter_token, found.tokens_per_s) == ((0.5, 2.5, 2.5), (5 / 3.75, 3 / 3.0))
