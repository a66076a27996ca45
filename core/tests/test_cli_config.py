"""Config files combined with command-line options that override them."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from specdec_core import cli
from specdec_core.cli.options import OWN_OPTIONS, mentioned_keys, model_options
from specdec_core.config.file import KEYS
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.errors import CapacityError

FILE = """\
model = "from-file"
dtype = "float16"
max_num_seqs = 4

[speculative_config]
method = "one"
num_speculative_tokens = 3
size = 2
"""
SPECULATION = {"method": "one", "num_speculative_tokens": 3, "size": 2}


@pytest.fixture
def keywords(tmp_path):
    """Return a function that runs a test command with a config file, command-line arguments and defaults.

    The function returns the keyword arguments for LLM, or (exit code, error) if the command fails.
    """
    (tmp_path / "some.toml").write_text(FILE)
    (tmp_path / "plain.toml").write_text('model = "from-file"\n')

    def run(*arguments, file=None, **defaults):
        found = []
        command = click.command()(model_options(**defaults)(lambda options: found.append(dict(options.keywords))))
        config = ["--config", str(tmp_path / file)] if file else []
        result = CliRunner().invoke(command, [*config, *arguments])
        return found[0] if found else (result.exit_code, result.stderr or result.exception)

    return run


def test_without_anything(keywords):
    assert keywords() == {"model": "tiny", "dtype": "auto", "speculative_config": None}
    found = keywords(method="one", num_speculative_tokens=8, dtype="float32")
    assert found == {
        "model": "tiny",
        "dtype": "float32",
        "speculative_config": {"method": "one", "num_speculative_tokens": 8},
    }


def test_the_file_counts(keywords):
    expected = {"model": "from-file", "dtype": "float16", "max_num_seqs": 4, "speculative_config": SPECULATION}
    assert keywords(file="some.toml") == expected
    assert keywords(file="some.toml", method="two", num_speculative_tokens=8, dtype="float32") == expected
    found = keywords(file="plain.toml", method="two", dtype="float32")["speculative_config"]
    assert found == {"method": "two", "num_speculative_tokens": 5}
    assert keywords(file="plain.toml")["speculative_config"] is None


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--model", "m", "--dtype", "float32"], {"model": "m", "dtype": "float32"}),
        (["--engine", "max_num_seqs=8", "--engine", "max_model_len=9"], {"max_num_seqs": 8, "max_model_len": 9}),
        (["--engine", "kv_manager_config.a=1"], {"kv_manager_config": {"a": 1}}),
        (["--set", "size=7"], {"speculative_config": {**SPECULATION, "size": 7}}),
        (["--set", "other=[1, [2.5, 3]]"], {"speculative_config": {**SPECULATION, "other": [1, [2.5, 3]]}}),
        (["--set", "other=[(0,), (1,)]"], {"speculative_config": {**SPECULATION, "other": "[(0,), (1,)]"}}),
        (["--set", "other=[true, 1]"], {"speculative_config": {**SPECULATION, "other": "[true, 1]"}}),
        (["--set", "other=7"], {"speculative_config": {**SPECULATION, "other": 7}}),
        (["--num-speculative-tokens", "9"], {"speculative_config": {**SPECULATION, "num_speculative_tokens": 9}}),
        (["--set", "num_speculative_tokens=9"], {"speculative_config": {**SPECULATION, "num_speculative_tokens": 9}}),
        (
            ["--method", "two", "--set", "num_speculative_tokens=9"],
            {"speculative_config": {"method": "two", "num_speculative_tokens": 9}},
        ),
        (["--method", "one"], {}),
        (["--method", "two"], {"speculative_config": {"method": "two", "num_speculative_tokens": 5}}),
        (
            ["--method", "two", "--set", "width=1", "--num-speculative-tokens", "2"],
            {"speculative_config": {"method": "two", "num_speculative_tokens": 2, "width": 1}},
        ),
    ],
)
def test_options_override_the_file(keywords, arguments, changed):
    assert keywords(*arguments, file="some.toml") == {**keywords(file="some.toml"), **changed}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "max_num_seq=8"], "--engine has no key 'max_num_seq': did you mean 'max_num_seqs'?"),
        (["--engine", "dtype=float32"], "--engine dtype=float32: give dtype as --dtype"),
        (["--engine", "speculative_config=x"], "give speculative_config as --method and --set"),
        (["--engine", "seed=1", "--engine", "seed=2"], "--engine seed=2 is given twice: give seed once"),
        (["--engine", "kv_manager_config=4"], "write kv_manager_config.OPTION=VALUE, one for each option"),
        (["--engine", "seed.a=4"], "--engine seed.a=4: write seed=VALUE"),
        (["--engine", "kv_manager_config.a=1", "--engine", "kv_manager_config.a=2"], "give kv_manager_config.a once"),
        (["--set", "a=1", "--set", "a=2", "--method", "one"], "--set a=2 is given twice: give a once"),
        (["--set", "method=one"], "--set method needs a method: give --method"),
        (["--set", "method=two", "--method", "one"], "give method as --method"),
        (
            ["--set", "num_speculative_tokens=9", "--num-speculative-tokens", "8", "--method", "one"],
            "--set num_speculative_tokens=9 and --num-speculative-tokens 8 say the same: give one of them",
        ),
        (
            [*["--set", "num_speculative_tokens=9"] * 2, "--method", "one"],
            "--set num_speculative_tokens=9 is given twice: give num_speculative_tokens once",
        ),
    ],
)
def test_options_that_contradict_each_other(keywords, arguments, says):
    status, stderr = keywords(*arguments)
    assert status == 2
    assert says in " ".join(stderr.split())


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        ("lower max_model_len, or raise num_kv_blocks", {"max_model_len", "num_kv_blocks"}),
        ("Name another with tokenizer=...", {"tokenizer"}),
        ("the tokenizer of 'x', revision 3, dtype=..., model='x'", set()),
        ("or pass skip_tokenizer_init=True", set()),
        ("LLM has no key 'max_model_le'. The keys are max_model_len", set()),
    ],
)
def test_keys_that_an_error_mentions(message, keys):
    assert mentioned_keys(message) == keys


@pytest.mark.parametrize("command", ["check", "generate"])
def test_help_ends_with_the_keys(command):
    """The help lists the keys of the engine and of speculative_config, except those with a command-line option."""
    result = CliRunner().invoke(cli.main, [command, "--help"])
    assert result.exit_code == 0
    _, engine, speculation = re.split(r"\nKeys for --(?:engine|set)[^\n]*:\n", result.stdout)

    def listed(section):
        return re.findall(r"^  (\w+)", section, re.MULTILINE)

    assert set(listed(engine)) == KEYS - OWN_OPTIONS.keys()
    assert set(listed(speculation)) == SpeculativeConfig.core_keys() - {"method", "num_speculative_tokens"}
    assert "block_size              Tokens in a block of the KV cache.  [an integer from" in engine


def test_a_hint_says_how_keywords_are_spelt(monkeypatch):
    def fail(self, plugins=None):
        raise CapacityError("raise num_kv_blocks")

    monkeypatch.setattr("specdec_core.cli.options.ModelOptions.load", fail)
    result = CliRunner().invoke(cli.main, ["generate", "x"])
    assert (result.exit_code, result.stderr) == (
        1,
        "error: raise num_kv_blocks\nhint: here, --engine num_kv_blocks=VALUE, or in a --config FILE\n",
    )
