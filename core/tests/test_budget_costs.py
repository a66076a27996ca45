"""What a step costs, as the budget estimates it: the curve of a step, and the clocks of drafting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from simulated_budget import budget_at, request_of

from specdec_core.budget import clock
from specdec_core.budget.choice import Expected
from specdec_core.budget.clock import Clock
from specdec_core.budget.cost_curve import MOST_AGE, NUM_BETWEEN, CostCurve
from specdec_core.budget.debt import Debt
from specdec_core.budget.recent import NUM_NEEDED, OUTLIER
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.report import StepReport
from specdec_core.engine.speculation import Speculation


def test_the_curve_follows_the_machine_and_not_one_slow_step() -> None:
    curve = CostCurve({1: 1.0, 4: 1.1, 16: 2.0}, 64)
    assert curve.seconds(1)[64] > curve.seconds(1)[16] == 2.0
    for i in range(4 * NUM_BETWEEN):
        curve.add(1, 4, 90.0 if i == 9 else 1.1)
    assert curve.seconds(1)[4] == pytest.approx(1.1)
    for _ in range(4 * NUM_BETWEEN):
        curve.add(1, 4, 2.2)
    assert curve.seconds(1)[[1, 4, 16]] == pytest.approx([2.0, 2.2, 4.0]), "no other size was measured lately"


def test_the_change_of_the_load_goes_by_most_of_the_steps() -> None:
    """A few retries just before the machine becomes slower do not halve the change."""
    curve = CostCurve({1: 1.0, 64: 2.0}, 64)

    def run(load: float, retried: float) -> None:
        for _ in range(NUM_NEEDED):
            curve.add(1, 4, retried * curve._base[4])
        for _ in range(NUM_BETWEEN - NUM_NEEDED):
            curve.add(1, 1, load)

    run(1.0, 1.0)
    run(3.0, 1.0)
    assert curve.load == pytest.approx(3.0, rel=0.2)


def test_where_requests_are_dear_draft_tokens_are_not() -> None:
    """The curve is measured with few requests that have many draft tokens."""
    curve = CostCurve({1: 1.0, 8: 1.07, 64: 1.63, 128: 2.27}, 256)
    for _ in range(NUM_BETWEEN):
        curve.add(64, 64, 5.0)
    assert curve.at(64) == pytest.approx(5.0)
    assert curve.at(64, 128) == pytest.approx(5.0 + 0.64)
    assert curve.at(1, 128) == pytest.approx(curve.at(1) + 1.27), "of other requests, too"
    for _ in range(NUM_BETWEEN):
        curve.add(64, 96, 6.0)
    assert curve.at(64, 96) == pytest.approx(6.0)
    assert curve.at(64, 128) == pytest.approx(6.0 + 0.32), "having drafts at all takes time, and further tokens little"
    for _ in range(NUM_BETWEEN):
        curve.add(64, 128, 6.0 + 3 * 0.32)
    assert curve.at(1, 128) > curve.at(1) + 1.4 * 1.27, "draft tokens turned out to be dearer"
    for _ in range(NUM_BETWEEN):
        curve.add(64, 256, 6.0 + 3 * (0.32 + 1.28))
    assert curve.at(1, 128) > curve.at(1) + 2 * 1.27, "the more of them show it, the more that counts"


def test_steps_with_drafts_stay_relative_to_plain_ones_of_as_many_requests() -> None:
    """Many changes of the load, all of them estimates, would add up to a wrong one."""
    curve = CostCurve({1: 1.0, 64: 1.6}, 128)

    def run(num_requests: int, num_drafted: int, seconds: float) -> None:
        for _ in range(2 * MOST_AGE):
            curve.add(num_requests, num_requests + num_drafted, seconds)

    run(64, 8, 6.0)
    run(64, 0, 5.0)
    for _ in range(5):
        run(1, 0, 1.0)
        run(8, 0, 3.0)
        run(1, 0, 1.4)
    assert curve.at(64, 72) == pytest.approx(curve.at(64) * 6.0 / 5.0)
    run(64, 0, 5.0)
    assert curve.at(64) == pytest.approx(5.0)
    assert curve.at(64, 72) == pytest.approx(6.0)


def test_many_draft_tokens_that_once_were_dear_are_tried_again() -> None:
    """Fewer are drafted since then, so that nothing else would show what they cost now."""
    curve = CostCurve({1: 1.0, 256: 3.55}, 256)

    def run(num_drafted: int, seconds: float) -> None:
        for _ in range(MOST_AGE):
            curve.add(8, 8 + num_drafted, seconds)

    run(0, 1.0)
    run(128, 9.0)
    run(16, 1.3)
    assert curve.at(8, 8 + 128) == pytest.approx(9.0), "one number alone does not show what further ones add"
    run(32, 1.5)
    for _ in range(MOST_AGE // 2):
        curve.add(8, 8 + 16, 1.3)
        curve.add(8, 8 + 32, 1.5)
    assert curve.at(8, 8 + 128) < 4.0
    assert curve.at(8) == pytest.approx(1.0), "plain steps are measured for their own sake"
    assert curve.at(8, 8 + 24) == pytest.approx(1.4, rel=0.1)
    run(0, 1.0)
    run(0, 1.0)
    assert curve.at(8, 8 + 32) == pytest.approx(1.5), "where nothing is drafted, what was measured last stays"
    assert curve.at(8, 8 + 128) == pytest.approx(9.0)


def test_a_batch_of_requests_that_are_dear_drafts() -> None:
    """Eight more tokens add 4 to a step of 10."""
    budget, requests = budget_at(0.5, *"abcdefgh", most=1), [request_of(name) for name in "abcdefgh"]
    for _ in range(NUM_BETWEEN):
        budget._curve.add(8, 8, 10.0)
    assert budget.share(requests, [1] * 8, Expected.of_plain(8)) == [1] * 8


def test_a_number_of_requests_that_was_never_measured_is_like_its_neighbors() -> None:
    curve = CostCurve({1: 1.0, 64: 2.0}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 1, 1.0)
        curve.add(16, 16, 6.0)
    ratios = [curve.at(number) / CostCurve({1: 1.0, 64: 2.0}, 64).at(number) for number in (1, 2, 4, 8, 16, 64)]
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(1.0)
    assert ratios[1] > 1.1
    assert ratios[-2] == pytest.approx(ratios[-1])


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60), st.sampled_from([0.01, 0.3, 1.0, 2.0, 50.0])), max_size=40
    )
)
@example(steps=[(4, 12, 1.0)] * 4 + [(4, 13, 1.0), (5, 0, 1.0)])
@settings(deadline=None)
def test_more_tokens_never_take_less_time(steps: list[tuple[int, int, float]]) -> None:
    curve = CostCurve({1: 1.0, 8: 1.2, 32: 2.0}, 64)
    for num_requests, more, seconds in steps:
        for _ in range(8):
            curve.add(num_requests, min(num_requests + more, 64), seconds)
            curve.seconds(num_requests)  # the engine asks meanwhile
            curve.seconds(min(num_requests + more, 64))
    for number in (1, 2, 5, 16, 40, 64):
        seconds_of = curve.seconds(number)
        assert np.isfinite(seconds_of).all()
        assert (np.diff(seconds_of) >= 0).all()
        assert seconds_of[1] > 0


def test_steps_that_are_slow_now_and_then_are_not_dear() -> None:
    """As are the first ones of each size, for which libraries compile code."""
    curve = CostCurve({1: 1.0, 6: 1.5}, 16)
    for i in range(2 * NUM_BETWEEN):
        curve.add(1, 1, 1.0)
        curve.add(1, 6, 3.0 if i % 3 == 0 else 1.5)
    assert curve.seconds(1)[[1, 6]] == pytest.approx([1.0, 1.5])


def test_further_tokens_are_as_cheap_as_in_any_batch() -> None:
    """Those that seem too dear are never tried."""
    curve = CostCurve({1: 1.0, 2: 1.0, 4: 1.0, 64: 7.0}, 64)
    for _ in range(NUM_BETWEEN):
        for num_requests, slower in ((1, 1.0), (4, 3.0)):
            for num_tokens in (num_requests + 4, num_requests + 40):
                curve.add(num_requests, num_tokens, slower * 0.1 * num_tokens)
        curve.add(2, 2, 1.0)
    assert curve.seconds(2)[42] - curve.seconds(2)[2] == pytest.approx(4.0, rel=0.1)


def test_one_slow_measurement_makes_no_larger_step_dear() -> None:
    assert CostCurve({1: 1, 8: 10, 16: 2}, 64).seconds(1)[[8, 12, 16]].tolist() == [2, 2, 2]


def test_the_curve_learns_of_steps_that_were_never_measured() -> None:
    """As of a slow model, of which only the smallest steps were measured when the engine was built."""
    curve = CostCurve({1: 1.0, 2: 1.0}, 128)
    for _ in range(64):
        curve.add(1, 16, 1.0)
        curve.add(1, 96, 6.0)
    assert curve.seconds(1)[96] > 3 * curve.seconds(1)[16]


def test_what_was_learned_of_a_size_stays_relative_to_the_others() -> None:
    curve = CostCurve({1: 1.0, 6: 1.2}, 64)
    for _ in range(4 * NUM_BETWEEN):
        curve.add(1, 1, 1.0)
        curve.add(1, 6, 3.6)
    for _ in range(400):
        curve.add(1, 1, 2.0)
    assert curve.at(1, 6) / curve.at(1) == pytest.approx(3.6), "the machine is slower, and for both"
    assert not curve.is_out_of_date(1)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 6, 7.2)
    assert curve.is_out_of_date(1), "those had drafts"


def test_sizes_that_were_not_measured_since_a_large_change_are_doubtful() -> None:
    curve = CostCurve({1: 1.0, 6: 1.2}, 16)
    for seconds in (1.2, 1.5, 3.0):
        for _ in range(2 * NUM_BETWEEN):
            curve.add(1, 6, seconds)
        assert curve.is_doubtful(1) == (seconds > 2)
        if seconds < 2:
            for _ in range(NUM_BETWEEN):
                curve.add(1, 1, 1.0)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 1, 1.0)
    assert not curve.is_doubtful(1)


def test_steps_count_with_their_numbers_of_requests_and_tokens() -> None:
    curve, added = CostCurve({1: 1.0, 6: 1.5}, 16), list[tuple[int, int]]()
    speculation = Speculation([], torch.device("cpu"), curve)
    curve.add = lambda num_requests, num_tokens, *_: added.append((num_requests, num_tokens))  # type: ignore[method-assign]
    speculation._own_drafts = {"any": Draft.from_chains([[7] * 2] * 4)}
    speculation.end_step(StepReport(num_decode_requests=4, num_nodes=8, target_s=1.0))
    assert added == [(4, 12)]


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_sizes_that_are_rarely_measured_are_corrected(slowdown: float) -> None:
    """As when requests do not draft, and are tried again from time to time."""
    curve, rare = CostCurve({1: 1.0, 24: 2.0}, 64), 300
    for step in range(3 * rare + NUM_BETWEEN):
        is_late = step > rare
        curve.add(1, 1, slowdown if is_late else 1.0)
        if step % rare == 0:
            curve.add(1, 24, 2.5 * (slowdown if is_late else 1.0))
        if step == 2 * rare:
            assert curve.at(1, 24) == pytest.approx(2.0 * slowdown), "two measurements are too few"
    assert curve.at(1, 24) == pytest.approx(2.5 * slowdown)


def test_one_step_far_below_the_estimate_counts_at_once() -> None:
    """What sampled drafts of one request cost says little about batches. Their steps seem as dear until one is run."""
    curve = CostCurve({1: 1.0, 16: 2.0, 64: 4.0}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 16, 6.0)
    assert curve.at(1, 24) > 3 * 2.0
    for seconds, expected in ((50.0, 6.5), (2.5, 2.5)):
        curve.add(1, 24, seconds)
        for _ in range(NUM_BETWEEN):
            curve.add(1, 4, 2.0)
        assert curve.at(1, 24) == pytest.approx(expected, rel=0.2), "it may have been interrupted, but not sped up"


def test_a_smaller_batch_than_any_before_seems_cheap() -> None:
    """It takes at least its share of the time of a larger one. More would make it seem too dear to try."""
    measured = Clock()
    for step in range(9):
        measured.add(64, 9.0, step)
    assert (measured.seconds(1), measured.seconds(64), measured.seconds(200)) == (9 / 64, 9, 9)
    for step in range(clock.SKIPPED_LATER + clock.NEEDED_LATER):
        assert not measured.knows(1)
        measured.add(1, 3.0, step)
    assert (measured.seconds(1), measured.seconds(63)) == (3, 3)


def test_old_measurements_do_not_count_where_recent_ones_are_asked_for() -> None:
    measured = Clock()
    for step in range(9):
        measured.add(1, 9.0, step)
    assert measured.recent_seconds(1, 20) == 9.0
    assert measured.recent_seconds(1, 20 + clock.MOST_AGE) == 0.0
    assert measured.seconds(1) == 9.0


def test_a_clock_tells_the_mean_of_similar_batches() -> None:
    measured = Clock()
    assert measured.seconds(3) == 0
    for i in range(clock.NUM_SKIPPED + NUM_NEEDED):
        measured.add(3, 99.0 if i < clock.NUM_SKIPPED or i == 4 else 2.0, step=i)
    assert measured.seconds(2) == measured.seconds(3) == pytest.approx((4 + OUTLIER) * 2.0 / 5), "99 is an outlier"
    assert measured.seconds(64) == measured.seconds(3), "the nearest smaller size that was measured"
    measured.add(3, 5.0, step=clock.MOST_AGE + 99)
    assert measured.seconds(3) == 5.0, "older measurements are stale"


def test_a_size_that_is_measured_for_the_first_time_says_nothing_about_others() -> None:
    """Steps with drafts take longer than the ones that were measured when the engine was built."""
    curve = CostCurve({1: 1.0, 6: 1.2}, 16)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 1, 1.0)
    for _ in range(2 * NUM_BETWEEN):
        curve.add(1, 6, 2.4)
    assert curve.seconds(1)[[1, 6]] == pytest.approx([1.0, 2.4])


def test_a_change_at_other_sizes_is_one_of_the_machine_if_that_is_noisy() -> None:
    changes = []
    for noise in (1.0, 1.5):
        curve = CostCurve({1: 1.0, 6: 1.5}, 16)
        for _ in range(NUM_BETWEEN):
            curve.add(1, 1, 1.0)
        for i in range(20):
            for _ in range(NUM_BETWEEN):
                curve.add(1, 6, 1.5 * noise ** (-1) ** i)
        before, seconds = curve.at(1, 6), 1.3 * curve.at(1)
        for _ in range(NUM_BETWEEN):
            curve.add(1, 1, seconds)
        assert curve.at(1) == pytest.approx(seconds)
        changes.append(curve.at(1, 6) / before)
    assert 1.0 < changes[0] < 1.1 < 1.2 < changes[1] < 1.3


def test_what_the_engine_does_beside_the_proposers_counts_once() -> None:
    """It is a part of the time of drafting, which the budgets measure without it: the forward pass pays for it."""
    curve, added, totals = CostCurve({1: 1.0, 6: 1.5}, 16), list[float](), list[float]()
    speculation = Speculation([], torch.device("cpu"), curve)
    assert speculation._plain_steps is not None
    speculation._plain_steps.end_steps = totals.append  # type: ignore[method-assign]
    curve.add = lambda num_requests, num_tokens, seconds, number=1: added.append(seconds)  # type: ignore[method-assign]
    speculation._own_drafts, speculation._own_s = {"any": Draft.from_chains([[7] * 5])}, 5.0
    speculation.end_step(StepReport(num_decode_requests=1, num_nodes=5, target_s=1.0, draft_s=7.0))
    assert (added, totals) == ([6.0], [8.0])


@given(st.lists(st.tuples(st.floats(0.1, 2), st.floats(0, 30)), min_size=1, max_size=60))
def test_what_is_done_now_and_then_takes_its_share_of_the_time(steps: list[tuple[float, float]]) -> None:
    """But for the last one, which is paid back later."""
    debt, spent, last, whole = Debt(0.05), 0.0, 0.0, 0.0
    for step_s, cost in steps:
        if debt.is_paid:
            spent, last = spent + cost, cost
            debt.add(cost)
        debt.pay(step_s)
        whole += step_s
    assert spent - last <= 0.05 * whole + 1e-9
