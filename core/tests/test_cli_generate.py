"""The command `spec-decode generate` on a random model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_setup import save_checkpoint

from specdec_core import LLM, SamplingParams, cli
from specdec_core.cli.options import Setting

PROMPT = "def first(values):\n    return "
SUMMARY = r"^\d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s"


@pytest.fixture
def generate(checkpoint, bigram_site, monkeypatch):
    """Return a function that runs the command in this process. The default model is the random one, in float32."""
    monkeypatch.syspath_prepend(bigram_site)
    monkeypatch.delenv("SPECDEC_DISABLE", raising=False)

    def run(*arguments, stdin=None):
        options = ["--model", str(checkpoint), "--dtype", "float32"]
        return CliRunner().invoke(cli.main, ["generate", *options, *arguments], input=stdin)

    return run


@pytest.fixture(scope="session")
def expected(checkpoint):
    """The command's expected output: the text of the first 24 tokens of plain greedy decoding after PROMPT, and a
    newline."""
    (output,) = LLM(checkpoint, dtype="float32").generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    return output.outputs[0].text + "\n"


def test_streamed_whole_and_speculative_text_are_the_same(generate, expected):
    plain = generate("--max-tokens", "24", PROMPT)
    assert (plain.exit_code, plain.stdout) == (0, expected)
    assert re.fullmatch(SUMMARY + "\n", plain.stderr)
    assert generate("--max-tokens", "24", "--no-stream", PROMPT).stdout == expected
    speculative = generate("--max-tokens", "24", "--method", "bigram", "--num-speculative-tokens", "3", PROMPT)
    assert speculative.stdout == expected
    match = re.fullmatch(SUMMARY + r", acceptance length (\d\.\d\d) over (\d+) drafts\n", speculative.stderr)
    assert 1 < float(match[1]) <= 4
    assert int(match[2]) < 24


def test_a_method_without_its_draft_says_how_to_give_one(generate):
    failed = generate("--method", "medusa", PROMPT)
    assert failed.exit_code == 1
    assert "names no model, and no draft comes with the target" in failed.stderr
    assert "or train one with `spec-decode train medusa`\nhint: here, --set model=FOLDER, or in a" in failed.stderr


def test_a_terminal_is_told_why_it_waits(generate, monkeypatch):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: self.name == "<stderr>")
    assert generate("--max-tokens", "1", PROMPT).stderr.startswith("Loading.\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "FOLDER"], r"type `\x1b[31mred\x07`"),
        (["--model", "\x1b]0;title\x07"], r"model='\x1b]0;title\x07' cannot be read"),
        (["--method", "bigram", *["--set", "\x1b[31m=1"] * 2], r"Error: --set \x1b[31m=1 is given twice"),
    ],
    ids=["another library", "model", "usage"],
)
def test_errors_cannot_steer_the_terminal(generate, tmp_path, arguments, says):
    (tmp_path / "config.json").write_text('{"model_type": "\\u001b[31mred\\u0007"}')
    result = generate(*[str(tmp_path) if each == "FOLDER" else each for each in arguments], PROMPT)
    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert all(each.isprintable() or each == "\n" for each in result.stderr)


def test_only_a_single_prompt_is_streamed(generate, monkeypatch):
    calls = []
    for name in ("stream", "generate"):
        method = getattr(LLM, name)
        monkeypatch.setattr(LLM, name, lambda *a, name=name, method=method, **k: calls.append(name) or method(*a, **k))
    for arguments in ([PROMPT], ["--no-stream", PROMPT], [PROMPT, "x"]):
        assert generate("--max-tokens", "2", *arguments).exit_code == 0
    assert calls == ["stream", "generate", "generate"]


def test_several_prompts_one_from_standard_input(generate, expected):
    result = generate("--max-tokens", "24", "one\ntwo", "-", stdin=PROMPT)
    assert result.exit_code == 0
    assert result.stdout.startswith("=== 1/2 one\n")
    assert result.stdout.endswith(f"=== 2/2 def first(values):\n{expected}")
    assert result.stderr.startswith("48 tokens in ")


def test_sampling_is_reproducible_with_and_without_speculation(generate):
    options = ["--max-tokens", "24", "--temperature", "1.2", "--top-k", "50", "--top-p", "0.9", PROMPT]
    texts = [generate("--seed", "3", *options).stdout for _ in range(2)]
    texts.append(generate("--seed", "3", "--method", "bigram", *options).stdout)
    assert len(set(texts)) == 1
    assert generate("--seed", "4", *options).stdout != texts[0]


def test_settings_reach_the_method(generate):
    result = generate("--max-tokens", "24", "--method", "bigram", "--set", "most=0", PROMPT)
    assert (result.exit_code, result.stderr.rpartition(", ")[2]) == (0, "nothing was drafted\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("last", "last"),
        ("a=b", "a=b"),
        ("'4'", "4"),
        ("[(0,), (0, 0)]", "[(0,), (0, 0)]"),
        ("{", "{"),
    ],
)
def test_values_are_yaml_scalars(text, value):
    result = Setting().convert(f"key={text}", None, None)
    assert result == ("key", value)
    assert type(result[1]) is type(value)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--method", "bigran"], 1, "error: unknown proposer 'bigran'. Did you mean 'bigram'?"),
        (["--method", "bigram", "--disable", "bigram"], 1, "is disabled by the argument disable (--disable)"),
        (["--method", "bigram", "--set", "mots=3"], 1, "has no key 'mots': did you mean 'most'?"),
        (["--method", "bigram", "--set", "most"], 2, "'most' is not KEY=VALUE: write it like"),
        (["--method", "bigram", "--set", "=3"], 2, "'=3' is not KEY=VALUE"),
        (["--method", "bigram", "--set", "most=3", "--set", "most=4"], 2, "give most once"),
        (
            ["--method", "bigram", "--set", "num_speculative_tokens=3", "--num-speculative-tokens", "3"],
            2,
            "--set num_speculative_tokens=3 and --num-speculative-tokens 3 say the same: give",
        ),
        (["--set", "most=3"], 2, "--set most needs a method: give --method"),
        (["--num-speculative-tokens", "3"], 2, "--num-speculative-tokens needs a method: give --method"),
        (["--max-tokens", "0"], 1, "error: max_tokens=0 is too small"),
        (["--top-p", "0"], 1, "error: top_p=0.0 is out of range"),
        (["--model", "no/such/folder"], 1, "error: "),
        (["--dtype", "float31"], 1, "error: dtype='float31' is not known"),
        (["-", "-"], 2, "standard input can be read once"),
    ],
)
def test_bad_input(generate, arguments, status, says):
    result = generate(*arguments, PROMPT)
    assert (result.exit_code, result.stdout) == (status, "")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_model_is_named(generate):
    assert "'no/such/folder'" in generate("--model", "no/such/folder", PROMPT).stderr


@pytest.mark.parametrize("arguments", [[PROMPT], ["--no-stream", PROMPT], ["x", PROMPT]])
def test_logits_that_are_not_finite(generate, tmp_path, arguments):
    broken = save_checkpoint(tmp_path, is_broken=True)
    result = generate("--model", str(broken), *arguments)
    assert result.exit_code == 1
    assert "the model's logits were not finite" in result.stderr


@pytest.fixture
def process(checkpoint, bigram_site):
    """A process that runs the installed command and is in the middle of a long completion."""
    command = [Path(sys.executable).with_name("spec-decode"), "generate", "--model", checkpoint]
    options = ["--method", "bigram", "--max-tokens", "4000", "--temperature", "2", PROMPT]
    # Without compiled kernels: a first compilation is announced on stderr.
    env = {**os.environ, "PYTHONPATH": str(bigram_site), "SPECDEC_DISABLE": "kernels"}
    pipe = subprocess.PIPE
    # Background jobs of a shell ignore interrupts, and so would their child processes.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*command, *options], env=env, stdout=pipe, stderr=pipe) as running:
        signal.signal(signal.SIGINT, before)
        assert running.stdout.read(20), running.stderr.read()
        yield running
        running.kill()


def test_interrupt(process):
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"\ninterrupted\n")


def test_closed_pipe(process):
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(timeout=60), errors) == (1, b"")
