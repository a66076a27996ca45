"""Histograms of waiting times, against the times themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specdec_core.engine.histogram import BOUNDS_S, Times

TIMES = st.lists(st.floats(0, 2 * BOUNDS_S[-1]), min_size=1, max_size=50)


def bucket(seconds: float) -> tuple[float, float]:
    """The bounds of the bucket that a time is in, as far as percentiles tell."""
    bounds = [0.0, *BOUNDS_S]
    place = max(1, int(np.searchsorted(bounds, min(seconds, BOUNDS_S[-1]))))
    return bounds[place - 1], bounds[place]


@given(st.lists(TIMES, min_size=1, max_size=3), st.integers(0, 100))
def test_counts_and_percentiles(steps: list[list[float]], percent: int) -> None:
    times, every = Times(), sorted(each for step in steps for each in step)
    for step in steps:
        times.add(step)
    found = times.histogram("waited")
    assert (found.name, found.count) == ("waited", len(every))
    assert found.sum == pytest.approx(sum(every))
    assert found.value == pytest.approx(np.mean(every))
    assert {bound: sum(each <= float(bound) for each in every) for bound in found.buckets} == found.buckets
    below, above = (np.percentile(every, percent, method=method) for method in ("inverted_cdf", "higher"))
    assert bucket(below)[0] <= found.percentile(percent) <= bucket(above)[1]


def test_percentiles_within_a_bucket() -> None:
    times = Times()
    times.add([0.003] * 3 + [0.03])
    found = times.histogram("waited")
    assert found.percentile(50) == pytest.approx(0.002 + 0.003 * 2 / 3)
    assert found.percentile(100) == pytest.approx(0.05)
    assert Times().histogram("none").percentile(99) == Times().histogram("none").value == 0
