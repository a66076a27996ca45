"""`spec-decode check` on a random model: its report agrees with the engine that loads the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from specdec_core import LLM, cli
from specdec_core.cli.screen import counted


@pytest.fixture
def check(checkpoint, bigram_site, monkeypatch):
    monkeypatch.syspath_prepend(bigram_site)
    monkeypatch.delenv("SPECDEC_DISABLE", raising=False)

    def run(*arguments):
        options = ["--model", str(checkpoint), "--dtype", "float32"]
        return CliRunner().invoke(cli.main, ["check", *options, *arguments])

    return run


def test_what_is_said_is_what_the_engine_does(check, checkpoint):
    result = check("--json", "--method", "bigram", "--engine", "max_num_seqs=3", "--engine", "block_size=8")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    keywords = {"dtype": "float32", "max_num_seqs": 3, "block_size": 8}
    llm = LLM(checkpoint, speculative_config={"method": "bigram", "num_speculative_tokens": 5}, **keywords)
    assert found["ok"]
    assert (found["method"], found["num_speculative_tokens"]) == ("bigram", 5)
    assert found["target"]["max_model_len"] == llm.engine.target.info.max_model_len == 4096
    memory = found["memory"]
    assert memory["kv_bytes_per_token"] == llm.engine.target.kv_groups.only.bytes_per_token
    assert memory["num_blocks"] == llm.engine.kv.num_free_blocks == 3 * 4096 // 8
    assert memory["num_tokens"] == 3 * 4096
    assert (memory["num_full_requests"], memory["limited_by"]) == (3, "max_num_seqs")
    assert memory["kv_bytes"] == memory["num_tokens"] * memory["kv_bytes_per_token"]
    assert memory["target_weight_bytes"] == pytest.approx((checkpoint / "model.safetensors").stat().st_size, rel=0.05)


def test_the_table(check, checkpoint):
    result = check("--engine", "num_kv_blocks=1000")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(rf"^model +{re.escape(str(checkpoint))} \(llama, 2 layers\)", result.stdout, re.MULTILINE)
    for line in (
        r"runs on +cpu in float32|runs on +cuda:?\d* in float32",
        r"speculation +none",
        r"target weights +1\d\d\.\d\d KiB",
        r"draft weights +0 bytes",
        r"KV +512 bytes per token",
        r"scratch +none",
        r"KV cache +1000 blocks of 16 tokens, 7\.81 MiB, limited by num_kv_blocks",
        r"holds +16000 tokens, 3 of max_model_len=4096 tokens at once \(max_num_seqs=256\)",
        r"This would run\.",
    ):
        assert re.search(f"^(?:{line})", result.stdout, re.MULTILINE), line


def test_one_of_something_is_singular(check):
    result = check("--method", "bigram", "--num-speculative-tokens", "1")
    assert re.search("^speculation +bigram, 1 token per step *$", result.stdout, re.MULTILINE)
    assert (counted(1, "draft slot"), counted(0, "draft slot")) == ("1 draft slot", "0 draft slots")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "bigran"], "unknown proposer 'bigran'. Did you mean 'bigram'?"),
        (["--method", "bigram", "--set", "mots=3"], "has no key 'mots': did you mean 'most'?"),
        (["--method", "bigram", "--disable", "bigram"], "is disabled"),
        (["--engine", "max_model_len=5000"], "max_model_len=5000 is out of range"),
        (["--engine", "num_kv_blocks=1"], "1 KV blocks of 16 tokens"),
        (["--engine", "tokenizer=no/such/folder"], "the tokenizer of 'no/such/folder' cannot be loaded"),
        (["--model", "no/such/folder"], "model='no/such/folder' cannot be read"),
        (["--config", "no-such-file.toml"], "config file 'no-such-file.toml' cannot be read"),
    ],
)
def test_what_is_wrong_is_said(check, arguments, says):
    result = check(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr
    if "--config" not in arguments:
        result = check(*arguments, "--json")
        assert (result.exit_code, result.stderr) == (1, "")
        assert not json.loads(result.stdout)["ok"]
        assert says in json.loads(result.stdout)["error"]


def test_weights_are_not_read(check, checkpoint, tmp_path):
    """The command succeeds on a checkpoint with NaN weights, which the engine refuses."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    assert check("--model", str(tmp_path)).exit_code == 0


def test_help_imports_no_torch():
    script = """
import sys
from specdec_core.cli import main

try:
    main(["check", "--help"])
except SystemExit:
    assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
