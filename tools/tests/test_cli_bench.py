"""Tests of `spec-decode bench`, on a random model."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from tiny_setup import save_checkpoint

from specdec_core import DraftCounts, Plugins, cli
from specdec_core.cli.options import ModelOptions
from specdec_tools import bench as module

LINES = ["def one(values):\n", "import os\n", "x = [1, 2, 1, 2, 1\n"]


@pytest.fixture
def bench(checkpoint, bigram_site, monkeypatch):
    monkeypatch.syspath_prepend(bigram_site)
    monkeypatch.delenv("SPECDEC_DISABLE", raising=False)

    def run(*arguments):
        options = ["--model", str(checkpoint), "--method", "bigram", "--dtype", "float32", "--max-tokens", "12"]
        return CliRunner().invoke(cli.main, ["bench", *options, *arguments], env={"COLUMNS": "80"})

    return run


def row(stdout, name):
    """Find a row of the printed table by its first cell.

    Returns three cells: the number of output tokens, the acceptance length, and "yes" or "no" for equal outputs.
    """
    figures = r"(\d+) +[\d.]+ +[\d.]+ +[\d.]+x +([\d.]+) +[\d.]+% +[\d.]+ +(yes|no)"
    match = re.search(rf"^{name} +{figures} *$", stdout, re.MULTILINE)
    assert match, stdout
    return match.groups()


def test_built_in_prompts(bench, tmp_path):
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = bench("--runs", "2", "--set", "most=2", "--output", str(output), "--plot", str(plot))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    words = " ".join(result.stdout.split())
    ran = " in float32 on cpu, temperature 0, batches of 1, at most 12 tokens each; bigram with "
    options = "num_speculative_tokens=5, adaptive_draft_length=False, most=2, verifier=auto"
    assert words.count(f"{ran}{options}; python ") == 6
    assert max(map(len, lines)) <= 80
    assert [row(result.stdout, name)[::2] for name in ("edit", "write", "total")] == [
        ("48", "yes"),
        ("12", "yes"),
        ("60", "yes"),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")

    found = json.loads(output.read_text())
    assert found["settings"]["llm"]["speculative_config"] == {
        "method": "bigram",
        "num_speculative_tokens": 5,
        "most": 2,
    }
    (configuration,) = found["configurations"]
    assert configuration["speculative_config"] == {
        "method": "bigram",
        "num_speculative_tokens": 5,
        "most": 2,
        "adaptive_draft_length": False,
        "verifier": "auto",
        "disable_by_batch_size": None,
    }
    assert (configuration["name"], configuration["is_synthetic"], configuration["total"]) == (
        "bigram",
        False,
        found["total"],
    )
    assert (found["settings"]["runs"], found["settings"]["prompts"]) == (2, "built-in")
    assert (found["model"]["dtype"], found["num_speculative_tokens"]) == ("float32", 5)
    computing = {plugin.distribution for plugin in Plugins.load().listing() if "ops" in plugin.provides}
    assert {"torch", "transformers", "specdec-core", "python", "dist-bigram", *computing} == set(found["versions"])
    assert {"processor", "threads", "device", "system"} == set(found["machine"])
    assert [batch["group"] for batch in found["batches"]] == ["edit"] * 4 + ["write"]
    for batch in found["batches"]:
        assert len(batch["plain_runs_s"]) == len(batch["speculative_runs_s"]) == 2
        assert batch["first_difference"] is None
    total = found["total"]
    assert total["speed_up"] == pytest.approx(total["plain_s"] / total["speculative_s"], rel=1e-3)
    assert total["plain_s"] == pytest.approx(sum(group["plain_s"] for group in found["groups"].values()), rel=1e-3)
    assert 1 <= total["acceptance_length"] <= 3
    assert len(total["acceptance_rate_per_pos"]) <= 2
    assert total["acceptance_length"] == pytest.approx(1 + sum(total["acceptance_rate_per_pos"]), rel=1e-3)
    assert total["spec_decode_acceptance_length"] == total["acceptance_length"]
    assert total["spec_decode_acceptance_rate"] == pytest.approx(100 * total["acceptance_rate"], rel=1e-3)
    assert total["spec_decode_num_drafts"] == total["num_drafts_of_all_runs"]
    assert sum(each["spec_decode_num_drafts"] for each in total["contexts"].values()) == total["num_drafts_of_all_runs"]
    assert (
        sum(each["spec_decode_num_drafts"] for each in total["categories"].values())
        == (total["num_drafts_of_all_runs"])
    )
    assert 0 < total["drafting_share"] < 1
    assert 0 < total["distinct_4_grams"] <= 1
    assert total["efficiency"] == pytest.approx(total["decoding_speed_up"] * total["costs"]["output_token"], rel=1e-3)
    assert 1 <= total["costs"]["block_efficiency"] <= total["acceptance_length"]
    for waited in total["latency_s"].values():
        assert 0 < waited["time_to_first_token"]["p50"] <= waited["end_to_end"]["p50"] <= waited["end_to_end"]["p99"]
    for figures in (total, *found["groups"].values(), *found["batches"]):
        assert 0 < figures["unlooped"]["num_tokens"] <= figures["num_tokens"]
        assert figures["unlooped"]["num_drafts_of_all_runs"] <= figures["num_drafts_of_all_runs"]


def test_batches_are_of_one_group(bench, tmp_path):
    prompts, output = tmp_path / "some.jsonl", tmp_path / "out.json"
    groups = [r"$\b$", "c", r"$\b$", r"$\b$"]
    prompts.write_text("".join(json.dumps({"prompt": "x = ", "group": g, "id": 1}) + "\n\n" for g in groups))
    plot = tmp_path / "out.svg"
    result = bench(
        "--prompts", str(prompts), "--batch-size", "2", "--runs", "1", "--output", str(output), "--plot", str(plot)
    )
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(output.read_text())
    assert [(b["title"], b["group"], b["num_tokens"]) for b in found["batches"]] == [
        ("line 1 to line 5", r"$\b$", 24),
        ("line 7", r"$\b$", 12),
        ("line 3", "c", 12),
    ]
    assert found["settings"]["prompts"] == str(prompts)
    drawn = plot.read_text()
    assert "temperature 0, batches of 2, at most 12 tokens each;" in drawn


def test_requests_of_a_batch_run_together(bench, tmp_path, monkeypatch):
    (tmp_path / "some.txt").write_text("".join(LINES))
    seen = []
    monkeypatch.setattr(module, "print_results", seen.extend)
    assert bench("--prompts", str(tmp_path / "some.txt"), "--batch-size", "3", "--runs", "1").exit_code == 0
    ((comparison,),) = seen[0].rows.values()
    assert comparison.title == "line 1 to line 3"
    for run in (*comparison.plain, *comparison.speculative):
        assert len(run.token_ids) == 3
        assert any(report.num_decode_requests == 3 for report in run.reports)
    for run in comparison.speculative:
        whole = run.drafts_before([len(tokens) for tokens in run.token_ids])
        drafted = [n for report in run.reports for n in report.accepted_per_request.values()]
        assert (whole.num_drafts, whole.num_accepted) == (len(drafted), sum(drafted))
        alone = [run.drafts_before([12 * (i == j) for j in range(3)]) for i in range(3)]
        assert sum(alone, DraftCounts()) == whole
        assert all(each.num_drafts > 0 for each in alone)


def test_no_more_seats_than_prompts(bench, monkeypatch):
    seats, load = [], ModelOptions.load

    def noted(self, *args):
        seats.append(self.keywords["max_num_seqs"])
        return load(self, *args)

    monkeypatch.setattr(ModelOptions, "load", noted)
    result = bench("--batch-size", "100000000", "--runs", "1")
    assert result.exit_code == 0, result.output
    assert seats == [4, 4]


def test_sampling_is_compared_too(bench):
    result = bench("--temperature", "1.3", "--seed", "5", "--runs", "1")
    assert row(result.stdout, "total")[2] == "yes"


def test_different_output_is_told(bench, monkeypatch, tmp_path):
    other = save_checkpoint(tmp_path / "other", seed=1)
    load = ModelOptions.load

    def load_two_models(options, plugins):
        speculates = options.speculative_config is not None
        return load(options.with_keywords(model=str(other)) if speculates else options, plugins)

    monkeypatch.setattr(ModelOptions, "load", load_two_models)
    result = bench("--runs", "1", "--output", str(tmp_path / "out.json"))
    assert (result.exit_code, row(result.stdout, "total")[2]) == (0, "no")
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["total"]["identical"]
    assert any(isinstance(batch["first_difference"], int) for batch in found["batches"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompts", "no-such-file"], "prompts file 'no-such-file' cannot be read"),
        (["--output", "no/such/folder.json"], "--output 'no/such/folder.json' cannot be written"),
        (["--plot", "plot.txt"], "--plot 'plot.txt' has no known suffix: allowed are .png"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--method", "bigran"], "Did you mean 'bigram'?"),
    ],
)
def test_bad_input_is_noticed_before_anything_is_loaded(bench, monkeypatch, arguments, says):
    if "--method" not in arguments:
        monkeypatch.setattr(ModelOptions, "load", None)
    result = bench(*arguments)
    assert result.exit_code == 1
    assert says in result.stderr


def test_without_matplotlib(bench, monkeypatch):
    monkeypatch.setattr(ModelOptions, "load", None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = bench("--plot", "plot.png")
    assert result.exit_code == 1
    assert "pip install matplotlib" in result.stderr


def test_a_prompt_that_is_too_long_is_noticed_before_anything_is_measured(bench, tmp_path, monkeypatch):
    (tmp_path / "some.txt").write_text("short\n" + "x y z " * 4000 + "\n")
    monkeypatch.setattr(module, "compare", None)
    result = bench("--prompts", str(tmp_path / "some.txt"))
    assert result.exit_code == 1
    assert "4096" in result.stderr
