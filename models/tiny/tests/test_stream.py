"""training.stream keeps edit documents whole, and marks the tokens at which an edit departs from the code before it."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from specdec_model_tiny import model_path

CODE = '''def mean(values, weights):
    """Weighted mean of the values."""
    total = 0
    for value, weight in zip(values, weights):  # in pairs
        total += value * weight
    return total / sum(weights)
'''


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from training import corpus, data, edits, stream

    return SimpleNamespace(corpus=corpus, data=data, edits=edits, stream=stream)


@pytest.mark.parametrize(
    ("before", "after", "departs"),
    [
        ("a = b\n", "a = b\n", []),
        ("a = b + b\n", "a = cc + cc\n", ["cc ", "cc\n"]),
        ("a\nb\nc\n", "a\nc\n", ["c"]),
        ("a\nc\n", "a\nb\nc\n", ["b\nc"]),
        ("f(a: int)\n", "f(a)\n", [")"]),
    ],
)
def test_departures(before, after, departs, training):
    assert [after[s:e] for s, e in training.stream.departures(before, after)] == departs


@pytest.mark.parametrize("kind", ["rename", "remove_comments", "remove_docstrings", "replace_constant", "repeat"])
def test_marks_are_what_a_copy_gets_wrong(kind, training):
    """Copying the code before the edit, with a jump to where the texts agree again after each marked part, gives the
    code after the edit."""
    task, after = getattr(training.edits, kind)(CODE, ast.parse(CODE), random.Random(1), ["count"])
    text = f"# Task: {task}\n{CODE}{training.edits.RESULT}{after}"
    encoding = Tokenizer.from_file(str(Path(model_path()) / "tokenizer.json")).encode(text)
    marks = training.stream.marks(training.corpus.Document("edit", "", text), encoding)
    assert marks.any() == (kind != "repeat")
    assert marks.mean() < 0.2
    kept, before = [], CODE
    for (start, end), marked in zip(encoding.offsets, marks, strict=True):
        if start >= len(text) - len(after) and not marked:
            kept.append(text[start:end])
    for part in kept:
        assert part in before, "an unmarked token is not in what is left of the code before"
        before = before[before.index(part) + len(part) :]


def test_edits_stay_whole_and_nothing_is_lost(training):
    unit, rng = training.data.UNIT, np.random.default_rng(0)
    ids = np.arange(40 * unit + 77)
    ends = np.cumsum(rng.integers(20, unit + 1, 20))
    edits = [(ids[a:b], ids[a:b] % 3 == 0) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    rest = ids[ends[-1] :]
    stream, marks = training.stream.lay_out(edits, (rest, rest % 3 == 0))
    assert sorted(stream.tolist()) == ids.tolist()
    assert (marks == (stream % 3 == 0)).all()
    for edit, _ in edits:
        (start,) = np.flatnonzero(stream == edit[0])
        assert stream[start : start + len(edit)].tolist() == edit.tolist()
        assert start // unit == (start + len(edit) - 1) // unit
    places = np.flatnonzero(np.isin(stream, ids[: ends[-1]])) / len(stream)
    assert 0.4 < places.mean() < 0.6, "edits are not spread over the stream"
