"""Inverts a kit test for each broken proposer: the test that must detect the fault counts as passed if it fails."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from nightly import IS_NIGHTLY

from specdec_core import SpecdecError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For a broken proposer, keep only the kit test that must detect its fault. In the nightly run, the other kit tests
    must pass for it, unless it is marked is_variant."""
    cases = [getattr(getattr(item, "cls", None), "case", None) for item in items]
    items[:] = [
        item
        for item, case in zip(items, cases, strict=True)
        if case is None or (IS_NIGHTLY and not case.is_variant) or getattr(item, "originalname", None) == case.test
    ]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    case = getattr(pyfuncitem.cls, "case", None)
    if case is None or not {pyfuncitem.name, pyfuncitem.originalname} & set(case.fails):
        return (yield)
    try:
        yield
    except pytest.skip.Exception as skipped:
        pytest.fail(f"the test that is to notice {case.method!r} was skipped: {skipped}")
    except (
        AssertionError,
        SpecdecError,
        ValueError,
        pytest.fail.Exception,
    ):  # anything else is a mistake in the broken proposer
        return True
    pytest.fail(f"{case.method!r} went unnoticed")
