"""docs/tuning.md names options that exist, and figures of the benchmarks' result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import fields_dict

from specdec_core import DraftModelConfig, DraftTreeConfig, EngineConfig, Plugins, SamplingParams, SpeculativeConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")


def known_names() -> set[str]:
    """Options of the engine, of requests, of speculation and of all methods, and the methods themselves."""
    plugins = Plugins.load()
    methods = {name: plugins.proposer(name).config for name in plugins.proposers()}
    classes = (EngineConfig, SamplingParams, SpeculativeConfig, DraftModelConfig, DraftTreeConfig, *methods.values())
    return set(methods).union(*(fields_dict(each) for each in classes))


def unknown_names(text: str) -> set[str]:
    """The names in the last column of the table that are no option and no method."""
    table = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")]
    assert len(table) > 10
    return set(re.findall(r"`([a-z_]+)`", " ".join(table))) - known_names()


def test_the_table_names_options() -> None:
    assert unknown_names(TEXT) == set()


def test_an_option_that_there_is_not_is_noticed() -> None:
    assert unknown_names(TEXT.replace("`draft_window`", "`draft_windows`")) == {"draft_windows"}


def speed_up(rate: float, cost: float, number: int) -> float:
    """Expected tokens of a step that drafts a chain of `number` tokens, over its cost."""
    return sum(rate**accepted for accepted in range(number + 1)) / (1 + number * cost)


def test_best_numbers_are_computed() -> None:
    """The table of the best number of draft tokens, by acceptance rate and cost."""
    head, *lines = re.search(r"^\| acceptance rate.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)[0].strip().splitlines()
    costs = [float(number) for number in re.findall(r"\d\.\d+", head)]
    assert len(costs) == 7
    for line in lines[1:]:
        rate, *cells = line.strip("| ").split(" | ")
        for cost, cell in zip(costs, cells, strict=True):
            gains = [round(speed_up(float(rate), cost, number), 9) for number in range(65)]
            best = gains.index(max(gains))
            assert cell == f"{best}, {gains[best]:.2f}", (rate, cost)


@pytest.mark.parametrize(
    ("method", "batch_size", "temperature"),
    [("ngram", 1, 0.0), ("ngram", 1, 1.0), ("eagle3", 64, 0.0), ("ngram", 64, 0.0)],
)
def test_figures_are_measured(method: str, batch_size: int, temperature: float) -> None:
    record = json.loads((ROOT / "benchmarks/results/default_settings.json").read_text(encoding="utf-8"))
    *_, median = (
        row["median"]
        for row in [*record["rows"], *record["repeated"]]
        if row["prompts"] == "code"
        and (row["method"], row["batch_size"], row["temperature"]) == (method, batch_size, temperature)
    )
    assert re.search(rf"\b{median:.2f}\b", TEXT)
