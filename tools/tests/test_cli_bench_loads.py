"""`spec-decode bench` with loads, several configurations and synthetic acceptance, on a random model."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from specdec_core import cli
from specdec_core.cli.options import ModelOptions


@pytest.fixture
def bench(checkpoint, bigram_site, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(bigram_site)
    monkeypatch.delenv("SPECDEC_DISABLE", raising=False)
    (tmp_path / "some.jsonl").write_text(
        "".join(
            json.dumps({"question_id": i, "category": category, "turns": [f"x = {i}, ", "y"]}) + "\n"
            for i, category in enumerate(("math", "coding", "math"))
        )
    )

    def run(*arguments):
        options = ["--model", str(checkpoint), "--dtype", "float32", "--max-tokens", "12", "--runs", "1"]
        files = ["--prompts", str(tmp_path / "some.jsonl"), "--output", str(tmp_path / "out.json")]
        return CliRunner().invoke(cli.main, ["bench", *options, *files, *arguments], env={"COLUMNS": "80"})

    return run


def results(tmp_path):
    return json.loads((tmp_path / "out.json").read_text())


def test_numbers_of_users(bench, tmp_path):
    plot = tmp_path / "out.svg"
    result = bench("--method", "bigram", "--concurrency", "1,3", "--plot", str(plot))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("of 3 conversations only the first turn is run\n")
    assert " 6 requests, 1 at once, 3 at once, at most 12" in " ".join(result.stdout.split())
    found = results(tmp_path)
    assert (found["settings"]["concurrency"], found["settings"]["num_requests"]) == ([1, 3], 6)
    assert found["settings"]["num_conversations_cut_to_their_first_turn"] == 3
    assert found["settings"]["llm"]["max_num_seqs"] == 3
    assert "total" not in found
    assert [load["concurrency"] for load in found["loads"]] == [1, 3]
    for load in found["loads"]:
        assert (load["num_tokens"], load["identical"]) == (6 * 12, True)
        assert {*load["categories"]} == {"math", "coding"}
        assert load["tokens_per_s"]["speculative"]["user"] > 0
        waited = load["latency_s"]["speculative"]
        assert 0 < waited["time_to_first_token"]["p50"] <= waited["end_to_end"]["p95"]
    one, three = (load["costs"]["tokens_per_forward_pass"] for load in found["loads"])
    assert three > one
    drawn = plot.read_text()
    for text in ("tokens/s of all users together", "3 at once", "bigram", "temperature 0, 6 requests"):
        assert f"<!-- {text}" in drawn or text in drawn


def test_a_rate(bench, tmp_path):
    result = bench("--method", "bigram", "--request-rate", "1000,2000.5", "--num-requests", "5")
    assert (result.exit_code, result.stderr) == (0, "")
    found = results(tmp_path)
    assert [load["request_rate"] for load in found["loads"]] == [1000.0, 2000.5]
    assert [load["num_tokens"] for load in found["loads"]] == [60, 60]
    assert "max_num_seqs" not in found["settings"]["llm"], "the engine's own limit"


def test_several_configurations_share_the_plain_runs(bench, tmp_path):
    for most in (1, 3):
        config = {"speculative_config": {"method": "bigram", "num_speculative_tokens": 4, "most": most}}
        (tmp_path / f"most{most}.json").write_text(json.dumps(config))
    files = [str(tmp_path / f"most{most}.json") for most in (1, 3)]
    plot = tmp_path / "out.png"
    result = bench("--config", files[0], "--config", files[1], "--synthetic-acceptance", "1,0.5", "--plot", str(plot))
    assert (result.exit_code, result.stderr) == (0, "")
    found = results(tmp_path)
    names = ["bigram (most1.json)", "bigram (most3.json)", "synthetic"]
    assert [each["name"] for each in found["configurations"]] == names
    assert [each["is_synthetic"] for each in found["configurations"]] == [False, False, True]
    assert [each["speculative_config"].get("most") for each in found["configurations"]] == [1, 3, None]
    assert len({each["total"]["plain_s"] for each in found["configurations"]}) == 1
    assert all(each["total"]["identical"] for each in found["configurations"])
    assert found["configurations"][0]["total"] == found["total"]
    measured = found["configurations"][2]
    assert measured["speculative_config"]["synthetic_acceptance_rates"] == [1.0, 0.5]
    assert measured["total"]["spec_decode_per_position_acceptance_rates"][0] == 1.0
    assert "synthetic (no method: known tokens, accepted at these rates)" in measured["ran"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_synthetic_acceptance_under_a_load(bench, tmp_path):
    result = bench("--method", "bigram", "--synthetic-acceptance", "1,1,1", "--concurrency", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    (load,) = results(tmp_path)["configurations"][1]["loads"]
    assert load["spec_decode_acceptance_rate"] == 100.0
    assert load["identical"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--batch-size", "2", "--concurrency", "2"], 2, "--batch-size and --concurrency are different ways"),
        (["--request-rate", "2", "--concurrency", "2"], 2, "--concurrency and --request-rate are different ways"),
        (["--num-requests", "2"], 2, "--num-requests is for --concurrency and --request-rate"),
        (["--concurrency", "1,x"], 2, "'1,x' is not a list: give whole numbers above 0"),
        (["--concurrency", "99999999"], 2, "199999998 requests are more than the 1000000 that are allowed"),
        (["--concurrency", "0"], 2, "'0' is not a list: give whole numbers above 0"),
        (["--request-rate", "0"], 2, "'0' is not a list: give numbers above 0"),
        (["--request-rate", "inf"], 2, "'inf' is not a list: give numbers above 0"),
        (["--synthetic-acceptance", "-1"], 2, "'-1' is not a list: give numbers of 0 or more"),
        (["--synthetic-acceptance", "0.5,0.6"], 1, "synthetic_acceptance_rates="),
        (["--config", "a.json", "--config", "b.json"], 1, "'b.json' has max_model_len=64, but 'a.json' has None"),
        (["--config", "a.json", "--config", "a.json"], 1, "--config 'a.json' is given twice"),
    ],
)
def test_bad_input_is_noticed_before_anything_is_loaded(bench, monkeypatch, tmp_path, arguments, status, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ModelOptions, "load", None)
    config = {"speculative_config": {"method": "bigram", "num_speculative_tokens": 4}}
    (tmp_path / "a.json").write_text(json.dumps(config))
    (tmp_path / "b.json").write_text(json.dumps({**config, "max_model_len": 64}))
    result = bench(*arguments)
    assert (result.exit_code, " ".join(says.split()) in " ".join(result.stderr.split())) == (status, True), (
        result.stderr
    )
