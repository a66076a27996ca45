"""Tests of `spec-decode demo`, on a random model."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from tiny_setup import save_checkpoint

from specdec_core import Piece, cli
from specdec_core.cli.options import ModelOptions
from specdec_tools import demo_report
from specdec_tools.compare import Comparison, first_difference
from specdec_tools.demo_report import Answer
from specdec_tools.progress import working
from specdec_tools.tasks import TASKS

NO_TERMINAL = {"NO_COLOR": None, "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "100"}
TERMINAL = {**NO_TERMINAL, "FORCE_COLOR": "1", "TERM": "xterm-256color"}


@pytest.fixture
def demo(checkpoint, bigram_site, monkeypatch):
    monkeypatch.syspath_prepend(bigram_site)
    monkeypatch.setattr("specdec_tools.demo.NUM_RUNS", 1)

    def run(*arguments, env=NO_TERMINAL):
        options = ["--model", str(checkpoint), "--method", "bigram", "--max-tokens", "24"]
        return CliRunner().invoke(cli.main, ["demo", *options, *arguments], env=env)

    return run


@pytest.mark.parametrize("temperature", ["0", "1.5"])
def test_shows_compares_and_ends_with_the_verdict(demo, temperature):
    result = demo("--temperature", temperature)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["right results: 0 of 4", "identical output: yes"]  # a random model has no result right
    assert "\x1b" not in result.stdout
    assert "(here: no terminal, or NO_COLOR is set)" in result.stdout
    figures = r" +\d+\.\d +\d+\.\d +\d+\.\d\dx +\d\.\d\d +\d\.\d\d"
    for task in TASKS:
        before, after = result.stdout.split(task.prompt)
        completions = after.partition("checked: the result is wrong\n")[0]
        plain, speculative = re.split(r"(?:plain|bigram) -+\n", completions)[1:]
        assert plain == speculative
        assert task.title in before
        assert re.search(rf"{task.title} +wrong +24{figures}", after)
    assert re.search(rf"all +96{figures}", result.stdout)
    assert re.search(rf"at temperature 1 +96{figures}", result.stdout)
    assert max(map(len, lines[-9:])) <= 90


def test_accepted_draft_tokens_are_colored_on_a_terminal(demo):
    result = demo(env=TERMINAL)
    assert "\x1b[1;32mThis color:\x1b[0m" in result.stdout
    assert result.stdout.count("\x1b[1;32m") > 4
    for title, has_drafts in (("plain", False), ("bigram", True)):
        parts = re.findall(title + r" .*?-\x1b\[0m\n(.*?)\x1b\[2m", result.stdout, re.DOTALL)
        assert len(parts) == len(TASKS)
        assert any("\x1b[1;32m" in part for part in parts) == has_drafts
    assert re.search(r"bigram .*?-\x1b\[0m\n(?!\x1b\[1;32m)", result.stdout)  # the first token is not a draft's


def test_temperature_counts(demo):
    greedy, hot = (demo("--temperature", temperature).stdout for temperature in ("0", "1.5"))
    assert greedy.partition("plain -")[2].splitlines()[1] != hot.partition("plain -")[2].splitlines()[1]


def test_no_color_means_plain_text(demo):
    assert "\x1b" not in demo(env={**TERMINAL, "NO_COLOR": "1"}).stdout


def test_different_output_is_reported(demo, monkeypatch, tmp_path):
    other = save_checkpoint(tmp_path, seed=1)
    load = ModelOptions.load

    def load_two_models(options, plugins):
        speculates = options.speculative_config is not None
        return load(options.with_keywords(model=str(other)) if speculates else options, plugins)

    monkeypatch.setattr(ModelOptions, "load", load_two_models)
    result = demo()
    assert result.exit_code == 1
    assert "'rename a variable' differs from output token " in result.stdout
    assert "'at temperature 1' differs from output token " in result.stdout
    assert result.stdout.endswith("\nidentical output: no\n")


def pieces(*texts_and_drafts):
    return [Piece(i, text, is_draft=is_draft) for i, (text, is_draft) in enumerate(texts_and_drafts)]


def test_an_answer_is_right_whoever_drafted_it():
    task = TASKS[0]
    half = len(task.edited) // 2
    parts = (task.edited[:half], False), (task.edited[half:], True)
    answer = Answer(task, pieces(*parts), pieces(*parts))
    assert (answer.is_right, answer.first_difference) == (True, None)
    other = Answer(task, pieces(parts[0]), pieces(*parts))
    assert (other.is_right, other.first_difference) == (True, 1)


def test_sampled_drafts_give_other_tokens_and_that_is_no_failure(demo, monkeypatch):
    monkeypatch.setattr("specdec_tools.compare.SAME_TOKENS", frozenset({""}))
    monkeypatch.setattr(Comparison, "first_difference", property(lambda self: 3))
    result = demo()
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "identical output: yes")
    assert "\nnot compared, since their verifier may choose other tokens: rename a variable, " in result.stdout


def test_a_picture_of_odd_text():
    answer = Answer(TASKS[0], [], pieces(("\x1b[31m\x01\ud800", True)))
    picture = demo_report.picture(answer, Table(), "bigram")
    ElementTree.fromstring(picture.encode())
    assert "Plain" not in picture  # decoding gives the same tokens


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--method", "bigran"], 1, "Did you mean 'bigram'?"),
        (["--max-tokens", "0"], 1, "max_tokens=0 is too small"),
        (["--set", "most"], 2, "is not KEY=VALUE"),
        (["--num-speculative-tokens", "0"], 2, "--num-speculative-tokens"),
    ],
)
def test_bad_input(demo, arguments, status, says):
    result = demo(*arguments)
    assert result.exit_code == status
    assert says in result.stderr


@pytest.mark.nightly
def test_installed_command_with_its_pipe_closed(checkpoint, bigram_site):
    command = [Path(sys.executable).with_name("spec-decode"), "demo", "--model", checkpoint, "--method", "bigram"]
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(bigram_site)}
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe) as running:
        assert running.stdout.readline().startswith(b"Loading ")
        running.stdout.close()
        assert (running.stderr.read(), running.wait(timeout=60)) == (b"", 1)


@pytest.mark.parametrize(
    ("outputs", "index"),
    [([[1, 2], [1, 2]], None), ([[], []], None), ([[1, 2], [1, 3]], 1), ([[1], [1, 2]], 1), ([[1], [1], [2]], 0)],
)
def test_first_difference(outputs, index):
    assert first_difference(outputs) == index


def test_picture(demo, tmp_path):
    file = tmp_path / "demo.svg"
    assert demo("--svg", str(file)).exit_code == 0
    picture = file.read_text()
    assert len(picture) < 300_000
    assert re.findall(r"https?://[^\s\"]+", picture) == ["http://www.w3.org/2000/svg"]  # it loads nothing
    text = "".join(ElementTree.fromstring(picture).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert TASKS[0].code.splitlines()[0] in text
    assert "drafted by bigram and accepted" in text
    assert "at temperature 1" in text


def test_picture_that_cannot_be_written(demo, tmp_path):
    result = demo("--svg", str(tmp_path / "nowhere" / "demo.svg"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "give a file in a folder that exists" in result.stderr


def test_waiting_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr("specdec_tools.progress.SECONDS", 0.01)
    console = Console(file=io.StringIO(), force_terminal=False)
    with working(console, "Loading"):
        time.sleep(0.2)
    assert re.fullmatch(r"Loading \.\.+\n", console.file.getvalue())


def test_waiting_ends_with_an_error():
    console, threads = Console(file=io.StringIO(), force_terminal=False), threading.active_count()
    with pytest.raises(ZeroDivisionError), working(console, "Loading"):
        raise ZeroDivisionError
    assert console.file.getvalue() == "Loading \n"
    assert threading.active_count() == threads
