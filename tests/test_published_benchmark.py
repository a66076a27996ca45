"""benchmarks/published.py measures a target with a draft, here the embedded ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import published

from specdec_core import Plugins
from specdec_model_tiny import model_path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> list[dict]:
    """Run the script on two prompts and with few tokens. Returns the rows that it writes."""
    prompts, out = folder / "prompts.jsonl", folder / "published.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import os\n", "def mean(values):\n")))
    options = ["--prompts", str(prompts), "--max-tokens", "12", "--out", str(out)]
    options += ["--engine", json.dumps({"device": "cpu", "max_model_len": 128, "max_num_seqs": 2})]
    monkeypatch.setattr(sys, "argv", ["published.py", "tiny", *words, *options])
    published.main()
    record = json.loads(out.read_text())
    assert (record["num_prompts"], record["prompts"]) == (2, "prompts.jsonl")
    return record["rows"]


@pytest.mark.parametrize(
    ("words", "method"),
    [([str(model_path() / "drafts" / "eagle3")], "eagle3"), (["--method", "mlp_speculator"], "mlp_speculator")],
)
def test_a_draft_is_measured_in_each_way(words, method, tmp_path, monkeypatch, capsys):
    rows = run(monkeypatch, tmp_path, *words)
    ways = published.WAYS.get(method, published.DEFAULT)
    assert [(row["way"], row["temperature"]) for row in rows] == [(way, t) for way in ways for t in (0, 1)]
    for row in rows:
        config, keys = row["speculative_config"], ways[row["way"]]
        assert (config["method"], config["adaptive_draft_length"]) == (method, False)
        assert keys.items() <= config.items()
        assert row["num_drafts"] > 0
        rates = row["acceptance_rate_per_pos"]
        assert row["acceptance_length"] == pytest.approx(1 + sum(rates), abs=0.01)
    assert max(row["acceptance_length"] for row in rows) > 1
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2


def test_figures_of_papers_are_of_drafts_that_are_listed():
    plugins = Plugins.load()
    listed = {name for method in plugins.proposers() for name in plugins.proposer(method).published.values()}
    assert published.PAPERS.keys() <= listed
    assert published.of_the_paper("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", published.PAPERS_TREE, 0.0) == 6.74
    assert published.of_the_paper("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "chain of 5", 0.0) is None
    assert published.of_the_paper(None, published.PAPERS_TREE, 0.0) is None
