"""What a step without drafts costs, as the budget estimates it: else nothing shows that drafting does not pay."""

from __future__ import annotations

import random
from math import log
from statistics import mean

import pytest
import torch

from specdec_core.budget import cost_curve
from specdec_core.budget.cost_curve import LEAST_COLD, NUM_BETWEEN, NUM_PLAIN, CostCurve
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.report import StepReport
from specdec_core.engine.rest import MOST_STEPS, Rest
from specdec_core.engine.speculation import Speculation


def test_drafts_do_not_make_plain_steps_of_as_many_requests_dear() -> None:
    curve, plain = CostCurve({1: 1.0, 64: 2.0}, 64), CostCurve({1: 1.0, 64: 2.0}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(8, 8, 2 * plain.at(8))
        curve.add(4, 12, 6 * plain.at(4, 12))
    assert curve.at(4, 12) == pytest.approx(6 * plain.at(4, 12))
    assert curve.at(4) == pytest.approx(2 * plain.at(4)), "as those of 8 requests"


def test_slow_drafts_do_not_make_plain_steps_dear_that_never_ran() -> None:
    """What was measured when the engine was built holds: else nothing would show that drafting does not pay."""
    curve = CostCurve({1: 1.0, 64: 2.0}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 6, 1.7 * curve._base[6])
    assert curve.at(1, 6) == pytest.approx(1.7 * curve._base[6])
    assert curve.at(1) == 1.0


def test_steps_in_which_nothing_was_found_make_plain_ones_no_dearer() -> None:
    curve = CostCurve({1: 1.0, 9: 1.8}, 16)
    for _ in range(3 * NUM_BETWEEN):
        curve.add_empty(1, 1.4)
    assert curve.empty_s == pytest.approx(0.4)
    assert curve.seconds(1)[1] == 1.0
    for _ in range(NUM_BETWEEN):
        curve.add(1, 1, 1.2)
    assert curve.seconds(1)[1] == pytest.approx(1.2)
    for _ in range(2 * NUM_BETWEEN):
        curve.add_empty(1, 1.1)
    assert curve.empty_s == pytest.approx(0, abs=1e-9), "less than a plain step"


def test_the_noise_of_the_machine_is_not_what_drafting_in_vain_costs() -> None:
    """Every other step is interrupted. Each takes 0.1 longer after a proposer was asked in vain."""
    curve = CostCurve({1: 1.0, 9: 1.8}, 16)
    for step in range(3 * NUM_BETWEEN):
        late_s = 0.6 * (step % 4 > 1)
        curve.add(1, 1, 1.0 + late_s) if step % 2 else curve.add_empty(1, 1.1 + late_s)
    assert curve.empty_s == pytest.approx(0.1)


def test_steps_in_which_nothing_was_found_show_what_plain_ones_take_at_most() -> None:
    """While drafting goes on, plain steps are rarely measured."""
    curve = CostCurve({1: 1.0, 64: 1.6}, 64)

    def run(num_requests: int, seconds: float) -> None:
        for _ in range(NUM_BETWEEN):
            curve.add(num_requests, num_requests, seconds)

    run(1, 1.0)
    run(1, 2.0)  # the machine has become slower
    run(8, 3.0)
    for _ in range(NUM_BETWEEN):
        curve.add_empty(8, 2.0)
    assert curve.at(8) == pytest.approx(2.0)
    assert curve.empty_s < 0.1
    for _ in range(3 * NUM_BETWEEN):
        curve.add_empty(8, 9.0)
    assert curve.at(8) == pytest.approx(3.0), "as was measured"


def test_the_load_does_not_change_where_plain_steps_take_less_than_was_measured() -> None:
    curve = CostCurve({1: 1.0, 64: 1.6}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(8, 24, 2.0)
    load = curve.load
    for i in range(40 * NUM_BETWEEN):
        curve.add_empty(8, 1.2) if i % 4 == 0 else curve.add(8, 8, 1.25)
    assert curve.load == pytest.approx(load, rel=0.05)
    assert curve.at(8) == pytest.approx(1.2)


def test_the_curve_is_corrected_though_most_steps_find_nothing() -> None:
    curve = CostCurve({1: 1.0, 9: 1.8}, 16)
    for step in range(1, 2 * NUM_BETWEEN + 1):
        curve.add_empty(1, 2.4) if step % 8 in (0, 1) else curve.add(1, 1, 2.0)
    assert curve.seconds(1)[1] == pytest.approx(2.0)


def test_a_few_plain_steps_in_a_row_correct_the_curve() -> None:
    curve = CostCurve({1: 1.0, 9: 1.8}, 16)
    for _ in range(NUM_BETWEEN):
        curve.add(1, 1, 1.0)
    for step in range(8 * NUM_BETWEEN):  # drafts in most steps
        curve.add(1, 1, 0.5) if step % 128 < cost_curve.NUM_NEEDED else curve.add(1, 6, 1.5)
    assert curve.seconds(1)[1] == pytest.approx(0.5)


def test_few_draft_tokens_are_not_taken_for_plain_steps() -> None:
    curve = CostCurve({1: 1.0, 16: 2.0, 32: 3.0}, 64)
    for _ in range(NUM_BETWEEN):
        curve.add(8, 8, 1.5)
        curve.add(8, 9, 2.5)
    assert (curve.at(8), curve.at(8, 9)) == (pytest.approx(1.5), pytest.approx(2.5))


def test_noise_where_drafting_starts_and_stops_makes_plain_steps_no_slower() -> None:
    """If they seem slower than they are, drafting goes on, and nothing shows it."""
    draws = random.Random(0)
    curve, errors = CostCurve({1: 1.0, 6: 1.5}, 16), list[float]()
    for _ in range(200):
        for size, seconds in ((1, 1.0), (6, 1.5)):
            slow = draws.choice([0.8, 1.0, 1.25])  # the machine
            for _ in range(NUM_BETWEEN):
                curve.add(1, size, seconds * slow)
        errors.append(log(curve.seconds(1)[1] / curve.seconds(1)[6] * 1.5))
    assert -0.2 < mean(errors) <= 0, "single measurements err by 0.2"


def test_a_slow_while_makes_plain_steps_no_slower() -> None:
    curve = CostCurve({1: 1.0, 6: 1.5}, 16)
    for plain_s in (1.0, 1.3):  # at last, something else has the machine
        for _ in range(NUM_PLAIN if plain_s == 1 else NUM_PLAIN // 2):
            curve.add(1, 1, plain_s)
    for _ in range(2 * NUM_BETWEEN):
        curve.add(1, 6, 1.5)
    assert curve.at(1) == pytest.approx(1.0)
    for _ in range(NUM_PLAIN):
        curve.add(1, 1, 1.3)
    assert curve.at(1) == pytest.approx(1.3), "it stays so"


def test_plain_steps_count_once_the_caches_are_warm_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_core.engine.speculation.perf_counter", lambda: 0.0)  # counting takes no time
    curve = CostCurve({1: 1.0, 6: 1.5}, 16)
    speculation = Speculation([], torch.device("cpu"), curve)
    draft = Draft.from_chains([[7] * 5])

    def step(num_nodes: int, seconds: float) -> None:
        speculation._own_drafts = {"any": draft if num_nodes else None}
        speculation.end_step(StepReport(num_decode_requests=1, num_nodes=num_nodes, target_s=seconds))

    for _ in range(10):
        for i in range(LEAST_COLD + 4):
            step(0, 1.0 if i >= LEAST_COLD else 1.3)
        for _ in range(16):
            step(5, 1.5)
    assert curve.seconds(1)[[1, 6]] == pytest.approx([1.0, 1.5])


def test_all_plain_steps_count_that_are_decided_together() -> None:
    """The last one before the next decision is slower. Those of other sizes do not count."""
    curve = CostCurve({1: 1.0, 2: 1.1, 6: 1.5}, 16)
    speculation = Speculation([], torch.device("cpu"), curve)
    speculation._is_idle = True
    for _ in range(2 * NUM_BETWEEN):
        for i in range(MOST_STEPS):
            is_last, num_requests = i == MOST_STEPS - 1, 2 if i < 4 else 1
            speculation._rest = Rest([], [], num_left=MOST_STEPS - 1 - i)
            seconds = 9.0 if num_requests == 2 else 1.0 + 0.28 * is_last
            speculation.end_step(StepReport(num_decode_requests=num_requests, target_s=seconds))
    assert curve.seconds(1)[1] == pytest.approx(1 + 0.28 / (MOST_STEPS - 4))
