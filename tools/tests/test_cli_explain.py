"""The command `spec-decode explain`: what it prints, its JSON, and its HTML file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from tiny_setup import save_checkpoint

from specdec_core import Piece, cli
from specdec_tools.explain_html import html_of
from specdec_tools.explain_text import lines_of, percent, print_explanation
from specdec_tools.explained import ACCEPTED, NOT_REACHED, REJECTED, Explanation, Node, Step, Token

NO_TERMINAL = {"NO_COLOR": None, "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"}
EVIL = "<script>alert(1)</script>\x1b[31m\"'&"
SECONDS = {"drafting": 0.001, "forward_pass": 0.02, "verification": 0.003, "rest": 0.0005}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def explanation(text="x", *, sampled=False, methods=("ngram", "eagle3")):
    """Two steps: the prompt's, and one with a tree."""
    draft_prob = 0.5 if sampled else None
    own = methods[:1]
    nodes = tuple(
        Node(token_id, text, parent, depth, 0.25, draft_prob, state == ACCEPTED, state, by)
        for token_id, parent, depth, state, by in (
            (1, -1, 1, ACCEPTED, methods),
            (2, 0, 2, ACCEPTED, own),
            (3, 1, 3, REJECTED, own),
            (4, 2, 4, NOT_REACHED, own),
            (5, 0, 2, REJECTED, own),
            (6, -1, 1, REJECTED, own),
        )
    )
    token, rest = Token(9, text, 0.5, True), Token(8, text, 0.0001, False)
    steps = (
        Step(1, 2, text, True, "", (), (7,), Token(7, text, 0.9996, True), "plain", (token, rest, rest), SECONDS),
        Step(2, 3, text, False, "greedy", nodes, (1, 2, 9), token, "recovered", (token, rest, rest), SECONDS),
    )
    drafted = [Piece(1, text, True, methods=methods), Piece(2, text, True, methods=own)]
    pieces = (Piece(7, text, False), *drafted, Piece(9, text, False))
    about = {"model": text, "speculative_config": {"method": text}, "seed": None}
    return Explanation(about, text, (1, 2), methods, pieces, "", "length", steps)


class Parsed(HTMLParser):
    """elements: (name, attributes). open: names of elements that are not closed. text: all text, joined."""

    VOID = ("meta", "link")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def those(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture
def run(checkpoint, bigram_site, monkeypatch):
    monkeypatch.syspath_prepend(bigram_site)

    def run(*arguments, model=checkpoint, stdin=None, env=NO_TERMINAL):
        options = ["--model", str(model), "--dtype", "float32", "--method", "bigram", "--num-speculative-tokens", "4"]
        return CliRunner().invoke(cli.main, ["explain", *options, *arguments], input=stdin, env=env)

    return run


def test_what_it_prints(run):
    result = run("class Bigram(Proposer):\n", "--max-tokens", "12")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    assert re.search(
        r"^step 1  after '\\n', \d+ tokens\n  the prompt is read\n  drafting ", result.stdout, re.MULTILINE
    )
    counts = re.findall(r"(\d+) of (\d+) draft tokens? accepted \(verifier greedy\)", result.stdout)
    number = r"12 tokens in \d+ steps: (\d+) of (\d+) draft tokens accepted, acceptance length \d\.\d\d"
    assert re.search(number, result.stdout).groups() == tuple(
        str(sum(map(int, each))) for each in zip(*counts, strict=True)
    )
    found = json.loads(run("-", "--max-tokens", "12", "--json", stdin="class Bigram(Proposer):\n").stdout)
    assert result.stdout.startswith((found["prompt"] + found["text"]).rstrip())
    assert [token for step in found["steps"] for token in step["token_ids"]] == found["token_ids"]
    assert sum(step["num_accepted"] for step in found["steps"]) == found["totals"]["num_accepted"] > 0
    assert found["methods"] == ["bigram"]
    assert found["speculative_config"]["num_speculative_tokens"] == 4
    states = {node["state"] for step in found["steps"] for node in step["nodes"]}
    assert states <= {"accepted", "rejected", "not reached", "after the end"}


def test_plain_decoding_is_explained_too(checkpoint):
    options = ["explain", "--model", str(checkpoint), "--max-tokens", "3", "x"]
    result = CliRunner().invoke(cli.main, options, env=NO_TERMINAL)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("nothing was drafted") == 2
    assert "acceptance length" not in result.stdout


def test_logits_that_are_not_finite(run, tmp_path):
    result = run("x", model=save_checkpoint(tmp_path, is_broken=True))
    assert result.exit_code == 1
    assert "logits were not finite" in result.stderr


def test_a_file_that_cannot_be_written_is_refused_at_once(run, tmp_path):
    result = run("x", "--html", str(tmp_path / "none" / "found.html"))
    assert result.exit_code == 1
    assert "cannot be written: give a file in a folder that exists" in result.stderr


def test_color_only_on_a_terminal():
    for is_terminal in (True, False):
        console = Console(force_terminal=is_terminal, color_system="standard" if is_terminal else None, width=80)
        with console.capture() as capture:
            print_explanation(console, explanation(EVIL))
        assert ("\x1b[1;32m" in capture.get()) == is_terminal
        plain = re.sub(r"\x1b\[[\d;]*m", "", capture.get())
        assert "\x1b" not in plain, "control characters of tokens are escaped"
        assert max(map(len, plain.splitlines())) <= 80


def test_the_tree_in_a_terminal():
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        print_explanation(console, explanation(sampled=True))
    lines = capture.get().splitlines()
    assert [*lines_of(explanation().steps[1])] == [
        ("├ ", 0),
        ("│ ├ ", 1),
        ("│ │ ", 2),
        ("│ │ ", 3),
        ("│ └ ", 4),
        ("└ ", 5),
    ]
    start = lines.index("step 2  after 'x', 3 tokens")
    assert [line.split() for line in lines[start + 3 : start + 7]] == [
        ["token", "target", "draft"],
        ["├", "'x'", "25.0", "%*", "50.0", "%", "accepted", "ngram", "and", "eagle3"],
        ["│", "├", "'x'", "25.0", "%*", "50.0", "%", "accepted", "ngram"],
        ["│", "│", "'x'", "25.0", "%", "50.0", "%", "rejected", "ngram"],
    ]
    assert lines[start + 10].split() == ["'x'", "50.0", "%*", "recovered", "token"]
    assert "accepted by method: ngram 2 of 6, eagle3 1 of 1" in lines


def test_percent():
    assert [percent(p) for p in (0, 0.0004, 0.5, 0.9994, 0.9996, 1)] == [
        "0.0 %", "< 0.1 %", "50.0 %", "99.9 %", "> 99.9 %", "100.0 %",
    ]  # fmt: skip


def test_the_html_is_well_formed_and_self_contained():
    text = html_of(explanation(sampled=True))
    parsed = Parsed(text)
    assert not parsed.open
    assert not re.findall(r"https?:|//\w|@import|url\(", text)
    for _, attributes in parsed.elements:
        assert attributes.keys().isdisjoint({"src", "style", "srcset", "action", "xlink:href"})
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "data:,") == "data:,"
    assert not parsed.those("script")
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert ids == ["step-1", "step-2"]
    assert [("open" in each) for each in parsed.those("details")] == [False, True]
    assert len(parsed.those("summary")) == 2
    assert parsed.those("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in parsed.those("meta")
    assert "prefers-color-scheme: dark" in text
    rows = [each["class"] for each in parsed.those("tr")]
    assert rows == ["names", "next", "names", "root", *["accepted"] * 2, "rejected", "away", *["rejected"] * 2, "next"]


def test_all_text_is_escaped():
    parsed = Parsed(html_of(explanation(EVIL, methods=(EVIL, EVIL + "2"))))
    harmless = Parsed(html_of(explanation("x")))
    assert [name for name, _ in parsed.elements] == [name for name, _ in harmless.elements]
    text = "".join(parsed.texts)
    assert text.count("<script>alert(1)</script>") == text.count("alert") > 20
    assert "\x1b" not in text


def test_it_has_the_colors_of_the_front_page():
    colors = [re.findall(r"--(?:of-\d|back|raised|text|faint|line|strong|wrong): #\w+", text) for text in (
        html_of(explanation()),
        (Path(__file__).parents[2] / "server" / "specdec_server" / "front_page.html").read_text(),
    )]  # fmt: skip
    assert len(colors[0]) == 28
    assert colors[0] == colors[1]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_in_a_browser(tmp_path):
    """The browser applies the style, draws the tree, and complains about nothing."""
    file = tmp_path / "found.html"
    file.write_text(html_of(explanation(EVIL)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    found = subprocess.run(
        [CHROMIUM, *options, "--enable-logging=stderr", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in found.stderr
    assert found.stdout.count("<circle") == 7
    assert "<script" not in found.stdout
