"""training.overlap finds 13 words in a row that a text shares with a document of the training corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = "def area(width, height):\n    return width * height + 1\n"  # 14 words and signs


@pytest.fixture
def overlaps(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from training.corpus import Document
    from training.overlap import overlaps

    return lambda *documents: overlaps([TEXT], [Document("package", "file.py", document) for document in documents])


def test_finds_each_13_words_whatever_the_layout(overlaps):
    found = overlaps("x = 1\n", "import os\n" + TEXT.replace("\n    ", "  ") + "x = 2\n")
    ngrams = [
        "area ( width , height ) : return width * height + 1",
        "def area ( width , height ) : return width * height +",
    ]
    assert sorted(found) == [(0, ngram, "package/file.py") for ngram in ngrams]


def test_twelve_words_are_none(overlaps):
    assert overlaps(TEXT.replace("* height + 1", ""), TEXT.replace("return", "yield"), "un" + TEXT[:-3]) == []
