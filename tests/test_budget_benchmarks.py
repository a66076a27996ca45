"""The benchmarks that reach into the budget of a step follow its changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import calibration
import given_costs


def test_calibration_compares_estimates_with_what_is_accepted() -> None:
    row = calibration.measure("ngram", {}, 0.0, 50)
    assert row["num_nodes"] >= 50
    assert 0 <= row["expected_calibration_error"] <= 1


def test_steps_take_what_the_given_costs_say() -> None:
    costs = given_costs.Costs(fixed=5000.0, request=300.0, token=20.0, drafts=7000.0)
    assert costs.seconds(2, 2) == pytest.approx(5.64)
    assert costs.seconds(2, 5) == pytest.approx(12.7)
    cell = {"prompts": "code", "temperature": 0.0, "batch_size": 2}
    seconds = given_costs.measure(costs, cell, None, rounds=1, max_tokens=6)
    assert seconds == pytest.approx(2 * 5 * 5.64, rel=0.01), "two batches of five steps after the prompts'"
