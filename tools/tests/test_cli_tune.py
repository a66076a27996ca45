"""spec-decode tune: which settings it tries, which one it writes, and that what it writes can be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec_core.cli import main
from specdec_tools import tune
from specdec_tools.tune import Setting, Trial, try_all

OTHERS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix")
FAST = {"ngram": 1.5, "ngram, num_speculative_tokens=3": 2.0}


def invoke(*arguments: str, disable: tuple[str, ...] = OTHERS) -> Any:
    words = [word for name in disable for word in ("--disable", name)]
    return CliRunner().invoke(main, ["tune", "--max-tokens", "4", *words, *arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("x = 1\nx = 1\ny = 2\n", encoding="utf-8")
    return str(file)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Speed-ups by name (`FAST`, else 0.5) in place of measured ones. Returns what was measured: names, and numbers of
    batches."""
    measured: list[tuple[str, int]] = []

    def measure(options: Any, plain: Any, given: Any, trial: Trial, num_runs: int) -> None:
        for setting in given:
            measured.append((setting.name, len(trial.batches)))
            setting.ratios.extend([FAST.get(setting.name, 0.5)] * num_runs)
            setting.acceptance_lengths.extend([1.0] * num_runs)

    monkeypatch.setattr(tune, "_measure", measure)
    return measured


def test_what_it_writes_can_be_run(prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "best.json"
    result = invoke("--prompts", prompts, "--runs", "1", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert "ngram, adaptive_draft_length=False" in result.output
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["model"] == "tiny"
    ran = CliRunner().invoke(main, ["generate", "--config", str(output), "--max-tokens", "2", "x = 1"])
    assert ran.exit_code == 0, ran.output


def test_the_fastest_is_written(timed: Any, prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "best.json"
    result = invoke("--prompts", prompts, "--output", str(output))
    assert result.exit_code == 0, result.output
    expected = {"method": "ngram", "num_speculative_tokens": 3}
    assert json.loads(output.read_text(encoding="utf-8"))["speculative_config"] == expected
    assert "2.00 times as fast" in result.output


def test_a_methods_own_choice_is_preferred(prompts: str, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Setting({"method": "ngram", "num_speculative_tokens": 3}, [1.51]), Setting({"method": "ngram"}, [1.50])]
    assert tune._preferred(found) is found[1]
    found[0].ratios[0] = 1.56
    assert tune._preferred(found) is found[0]


def test_a_methods_own_choice_is_not_preferred_if_it_is_slower_than_plain_decoding(
    timed: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FAST", {"ngram": 0.995, "ngram, num_speculative_tokens=3": 1.02})
    output = tmp_path / "best.json"
    result = invoke("--prompts", prompts, "--output", str(output))
    assert "no setting was faster" not in result.output
    expected = {"method": "ngram", "num_speculative_tokens": 3}
    assert json.loads(output.read_text(encoding="utf-8"))["speculative_config"] == expected


def test_no_prompt_comes_twice_at_the_higher_load(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Trial] = []

    def measure(options: Any, plain: Any, given: Any, trial: Trial, num_runs: int) -> None:
        trials.append(trial)
        for setting in given:
            setting.ratios.append(1.0)
            setting.acceptance_lengths.append(1.0)

    monkeypatch.setattr(tune, "_measure", measure)
    result = invoke("--prompts", prompts)
    assert result.exit_code == 0, result.output
    assert trials[-1].batches == [["x = 1", "x = 1", "y = 2"]]
    assert "With 3: plain decoding" in result.output
    assert "needs as many" not in result.output


def test_as_many_run_at_once_as_it_says(timed: list[tuple[str, int]], prompts: str) -> None:
    result = invoke("--prompts", prompts, "--batch-size", "8")
    assert "--batch-size 8 needs as many prompts, and there are 3: these run at once, give more" in result.output
    assert "a higher load than 3 prompts at once is not tried" in result.output
    assert "speed-up, 3 at once" in result.output
    assert 'With 3 at once, use {"method": "ngram", "num_speculative_tokens": 3}' in result.output
    assert "8 at once" not in result.output
    assert "With 3:" not in result.output
    names = [name for name, _ in timed]
    assert len(names) == len(set(names)), "there is no higher load to measure"


def test_each_batch_is_full(timed: list[tuple[str, int]], prompts: str) -> None:
    result = invoke("--prompts", prompts, "--batch-size", "2")
    assert "1 of 3 prompts is left out, too few for another batch of 2" in result.output
    assert "With 2 at once" in result.output
    assert "With 3:" in result.output
    assert tune._batches(["a", "b", "c"], 2) == [["a", "b"]]
    assert {number for _, number in timed} == {1}


def test_nothing_is_faster_than_plain_decoding(
    timed: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FAST", {})
    output = tmp_path / "best.json"
    result = invoke("--prompts", prompts, "--output", str(output))
    assert "decode plainly: no setting was faster" in result.output
    assert "speculative_config" not in json.loads(output.read_text(encoding="utf-8"))


def test_rounds_leave_fewer_and_measure_more(timed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [Setting({"method": "ngram", "num_speculative_tokens": number}) for number in range(1, 28)]
    trial = Trial([["x"]] * 20, params=None)  # type: ignore[arg-type]
    found = try_all(None, None, tried, trial, 2)  # type: ignore[arg-type]
    sizes = [number for _, number in timed]
    assert [sizes.count(number) for number in (4, 8, 20)] == [27, 9, 3]
    assert found[0].name == "ngram, num_speculative_tokens=3"
    assert found[0].ratios == [2.0, 2.0]


def test_a_methods_own_choice_is_not_judged_by_few_prompts(
    timed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FAST", {"ngram": 0.1})  # as when the engine has not measured any costs
    tried = [Setting({"method": "ngram", "num_speculative_tokens": number}) for number in range(1, 28)]
    trial = Trial([["x"]] * 20, params=None)  # type: ignore[arg-type]
    found = try_all(None, None, [Setting({"method": "ngram"}), *tried], trial, 2)  # type: ignore[arg-type]
    assert found[-1].name == "ngram"
    assert [number for name, number in timed if name == "ngram"] == [20]


def test_only_some_of_many_own_choices_are_measured_again(
    timed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [Setting({"method": f"method {i}"}) for i in range(12)]
    monkeypatch.setattr(f"{__name__}.FAST", {each.name: 1 + i / 10 for i, each in enumerate(tried)})
    trial = Trial([["x"]] * 20, params=None)  # type: ignore[arg-type]
    found = try_all(None, None, tried, trial, 3)  # type: ignore[arg-type]
    assert [each.name for each in found] == ["method 11", "method 10", "method 9", "method 8"]
    assert [number for _, number in timed] == [20] * (12 + 4)
    assert len(found[0].ratios) == 3


def test_methods_without_a_model_are_combined_with_others() -> None:
    names = [each.name for each in _settings(("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix"))]
    assert "ngram + draft_model" not in names, "draft_model drafts alone"
    names = [each.name for each in _settings(("draft_model", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix"))]
    assert "ngram + eagle" in names
    assert "eagle, num_speculative_tokens=8" in names


def _settings(disable: tuple[str, ...]) -> list[Setting]:
    from specdec_core.cli.options import ModelOptions

    options = ModelOptions({"model": "tiny", "speculative_config": None}, disable)
    return tune.settings(options)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "ngram"), "tune chooses the method by itself"),
        (("--output", "best.toml"), "is written as JSON"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
