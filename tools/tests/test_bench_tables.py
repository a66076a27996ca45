"""The tables of `spec-decode bench`: their cells from hand-made runs, and what was run before each of them."""

from __future__ import annotations

import attrs
import pytest

from specdec_core.contracts.report import StepReport
from specdec_tools.bench_tables import print_results
from specdec_tools.compare import Comparison, Run
from specdec_tools.configurations import Ran
from specdec_tools.results import Result

CONFIG = {"method": "mine", "a": 1, "b": None}
RAN = Ran("mine", False, "model", "float32", "cpu", 0.5, "batches of 2", 8, 5, CONFIG, {"x": "1"})
SHOWN = (
    "model in float32 on cpu, temperature 0.5, batches of 2, at most 8 tokens each; mine with "
    "num_speculative_tokens=5, a=1; x 1"
)


def run(times_s: tuple[float, ...] = (1.0, 1.5, 4.0), *, drafts: bool = False) -> Run:
    """A run of two completions, of which one gets tokens in all steps and the other one in two. With drafts, each step
    after the first one drafts 4 tokens, which takes 0.25 s."""
    outputs = ({"r": 1}, {"r": 3, "s": 1}, {"r": 1, "s": 2})
    accepted = ({}, {"r": 2}, {"s": 1}) if drafts else ({}, {}, {})
    reports = tuple(
        StepReport(
            num_decode_requests=2, num_output_tokens=sum(output.values()), target_s=1.0, output_per_request=output,
            accepted_per_request=drafted, num_draft_tokens=4 * len(drafted), num_accepted=sum(drafted.values()),
            draft_s=0.25 * len(drafted),
        )
        for output, drafted in zip(outputs, accepted, strict=True)
    )  # fmt: skip
    return Run(times_s[-1], ((1,) * 5, (2,) * 3), reports, ("r", "s"), times_s, ((0,) * 126, (0,) * 300))


FASTER = run((0.5, 0.75, 2.0), drafts=True)


def printed(capsys: pytest.CaptureFixture[str], *results: Result) -> list[list[str]]:
    print_results(results)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return [line.split() for line in lines]


def test_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """8 tokens in 4 s and in 2 s; the median user gets 5 tokens in 4 s and 3 tokens in 4 s, and twice as many with
    drafts. 8 tokens in 6 forward passes of a request, of which 2 had a draft. A plain forward pass takes 1 s, drafting
    0.5 s for 8 tokens and 3 steps."""
    cells = printed(capsys, Result(RAN, {"some": [Comparison("t", (run(),), (FASTER,), ("g", "g"))]}, {}))
    heads = ["prompts", "tokens", "tokens/s", "tokens/s", "speed-up", "length", "drafts", "ciency", "output"]
    assert heads in cells, "in full"
    assert ["total", "8", "2.0", "4.0", "2.00x", "2.50", "25.0%", "1.75", "yes"] in cells
    assert ["total", "2.0", "4.0", "2.00x", "1.0", "2.0", "2.00x"] in cells
    assert ["under", "128", "1", "3.00", "1.00", "1.00"] in cells, "r: 126 tokens, and one before the draft"
    assert ["256", "to", "511", "1", "2.00", "1.00"] in cells
    assert ["total", "1.33", "(6)", "33%", "0.125", "0.17", "1.00", "0.88", "1.14x"] in cells
    assert ["end-to-end", "4000.0", "4000.0", "4000.0", "2000.0", "2000.0", "2000.0"] in cells


def test_what_was_run_is_before_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(RAN, {"some": [Comparison("t", (run(),), (FASTER,), ("g", "g"))]}, {})
    assert str(RAN) == SHOWN
    words = [word for line in printed(capsys, result) for word in line]
    assert " ".join(words).count(SHOWN) == 6, "times, users, drafts, contexts, costs, latencies"


def test_a_group_may_be_named_total(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"total": [Comparison("t", (run(),), (FASTER,))], "b": [Comparison("t", (run(),), (run(),))]}
    cells = printed(capsys, Result(RAN, rows, {}))
    assert ["total", "2.0", "4.0", "2.00x", "1.0", "2.0", "2.00x"] in cells
    assert ["total", "2.0", "2.7", "1.33x", "1.0", "1.4", "1.38x"] in cells, "the median of 2.5, 1.5, 1.25 and 0.75"


def test_loads_are_rows_without_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    """The groups of prompts, which run together, have a table of their own."""
    comparison = Comparison("t", (run(),), (FASTER,), ("edit", "write"))
    rows = {"1 at once": [comparison], "2 at once": [comparison]}
    cells = printed(capsys, Result(RAN, rows, {row: {} for row in rows}))
    assert ["2", "at", "once", "2.0", "4.0", "2.00x", "1.0", "2.0", "2.00x"] in cells
    assert ["edit", "2", "3.00", "1.00", "1.00"] in cells
    assert ["write", "2", "2.00", "1.00"] in cells
    assert cells.count(["end-to-end", "4000.0", "4000.0", "4000.0", "2000.0", "2000.0", "2000.0"]) == 2
    assert "total" not in [line[0] for line in cells if line]


def test_several_configurations_are_compared_with_the_same_plain_run(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run()
    first = Result(RAN, {"some": [Comparison("t", (plain,), (FASTER,))]}, {})
    other = Result(attrs.evolve(RAN, name="other"), {"some": [Comparison("t", (plain,), (plain,))]}, {})
    cells = printed(capsys, first, other)
    assert cells[-3:] == [
        ["plain", "2.0", "1.0"],
        ["mine", "4.0", "2.00x", "2.0", "2.00x", "2.50"],
        ["other", "2.0", "1.00x", "1.0", "1.00x", "1.00"],
    ]


def test_synthetic_acceptance_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    ran = attrs.evolve(RAN, name="synthetic", is_synthetic=True)
    words = [
        word
        for line in printed(capsys, Result(ran, {"a": [Comparison("t", (run(),), (FASTER,))]}, {}))
        for word in line
    ]
    assert " ".join(words).count("synthetic (no method: known tokens, accepted at these rates)") == 6
