"""training.stream keeps edit documents whole, and gives more weight to the tokens that it changes."""

from __future__ import annotations

import ast
import random
import re
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
    from training import corpus, data, edits, stream, tokenizer

    return SimpleNamespace(corpus=corpus, data=data, edits=edits, stream=stream, tokenizer=tokenizer)


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
def test_a_copy_gets_the_heavy_tokens_wrong_and_no_others(kind, training):
    """Copying the code before the edit, with a jump to where the texts agree again after each heavy part, gives the
    code after the edit."""
    task, after = getattr(training.edits, kind)(CODE, ast.parse(CODE), random.Random(1), ["count"])
    text = f"# Task: {task}\n{CODE}{training.edits.RESULT}{after}"
    encoding = Tokenizer.from_file(str(Path(model_path()) / "tokenizer.json")).encode(text)
    weights = training.stream.weights(training.corpus.Document("edit", "", text), encoding)
    heavy = weights == training.stream.DEPARTURE
    assert heavy.any() == (kind != "repeat")
    assert heavy.mean() < 0.2
    is_result = np.array(encoding.offsets)[:, 0] >= len(text) - len(after)
    assert (weights[~heavy] == is_result[~heavy]).all()
    kept, before = [], CODE
    for (start, end), departs in zip(encoding.offsets, heavy, strict=True):
        if start >= len(text) - len(after) and not departs:
            kept.append(text[start:end])
    for part in kept:
        assert part in before, "a light token is not in what is left of the code before"
        before = before[before.index(part) + len(part) :]


def test_words_that_begin_with_the_old_name_weigh_more_too(training):
    """A model that renames the keyword `total` or a part of `totals` shows that it has not read the code."""
    code = "def f(total):\n    return g(totals, total=total, subtotal=3)\n"
    task, after = training.edits.rename(code, ast.parse(code), random.Random(0), ["count"])
    text = f"# Task: {task}\n{code}{training.edits.RESULT}{after}"
    encoding = Tokenizer.from_file(str(Path(model_path()) / "tokenizer.json")).encode(text)
    weights = training.stream.weights(training.corpus.Document("edit", "", text), encoding)

    heavy = [text[b:e] for w, (b, e) in zip(weights, encoding.offsets, strict=True) if w == training.stream.DEPARTURE]
    assert "".join(heavy) == "count):\n(total totalcount,"


@pytest.mark.parametrize("seed", range(8))
def test_drills_rename_every_word_of_the_name_and_weigh_only_what_follows(seed, training):
    (document, *_) = training.edits.drills([training.corpus.Document("a", "a.py", CODE)] * 3, seed, len(CODE))
    head, separator, after = document.text.partition(training.edits.RESULT)
    task, before = head.split("\n", 1)
    if "rename" in task:
        old, new = task.split("`")[1::2]
        assert old in before
        changed = [(a, b) for a, b in zip(re.split(r"\b", before), re.split(r"\b", after), strict=True) if a != b]
        assert changed
        assert set(changed) == {(old, new)}
        assert f".{new}" not in after
    else:
        assert before == after
    encoding = Tokenizer.from_file(str(Path(model_path()) / "tokenizer.json")).encode(document.text)
    weights = training.stream.weights(document, encoding)
    result = np.array(encoding.offsets)[:, 0] >= len(head + separator)
    assert (weights[result] >= 1).all()
    assert (weights[~result] == 0).all()
    assert (weights == training.stream.DEPARTURE).any() == ("rename" in task)


@pytest.mark.parametrize(
    ("name", "code", "edits", "drills"), [("train", 0.55, 0.27, 0.18), ("decay", 0.32, 0.51, 0.17)]
)
def test_each_stream_has_its_shares_of_code_edits_and_drills(name, code, edits, drills, training):
    made = Path(training.edits.__file__).parent
    texts = [training.corpus.Document("a", path.name, path.read_text()) for path in sorted(made.glob("*.py"))]
    mixed = training.tokenizer.mix(texts * 10, name, seed=0)
    sizes = {source: sum(len(d.text) for d in mixed if d.source == source) for source in ("a", "edit", "drill")}
    shares = [size / sum(sizes.values()) for size in sizes.values()]
    assert shares == pytest.approx([code, edits, drills], abs=0.06)


def test_training_draws_frequent_names_more_often(training):
    texts = [
        training.corpus.Document("a", f"{i}.py", f"len({name})\n") for i, name in enumerate(["first", "second"] * 9)
    ]
    names = training.edits.training_names(texts, random.Random(0))
    assert len(names) == 6
    assert set(names) == {"len", "first", "second"}
    drawn = [training.edits.training_names(texts, random.Random(seed)).count("len") for seed in range(40)]
    assert sum(drawn) > 40 * 2.2


def test_edits_stay_whole_and_nothing_is_lost(training):
    unit, rng = training.stream.ROW, np.random.default_rng(0)
    ids = np.arange(40 * unit + 77)
    ends = np.cumsum(rng.integers(20, unit + 1, 20))
    edits = [(ids[a:b], ids[a:b] % 3 == 0) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    rest = ids[ends[-1] :]
    stream, weights = training.stream.lay_out(edits, (rest, rest % 3 == 0))
    assert sorted(stream.tolist()) == ids.tolist()
    assert (weights == (stream % 3 == 0)).all()
    for edit, _ in edits:
        (start,) = np.flatnonzero(stream == edit[0])
        assert stream[start : start + len(edit)].tolist() == edit.tolist()
        assert start // unit == (start + len(edit) - 1) // unit
    places = np.flatnonzero(np.isin(stream, ids[: ends[-1]])) / len(stream)
    assert 0.4 < places.mean() < 0.6, "edits are not spread over the stream"
