"""training.unloop marks what a continuation repeats at length, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch.compile's own imports
def test_long_repetitions_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from training.unloop import ALLOWED, NGRAM, repeats

    once, result = list(range(100, 100 + NGRAM)), [7, 8]
    short = once[: NGRAM - 1]
    texts = {
        "a loop": [*once, 1, *once, 2, *once, 3],
        "a loop of one": [5] * (NGRAM + ALLOWED),
        "twice": [*once, 1, *once, 2],
        "short": [*short, 1, *short, 2, *short, 3],
        "of the prompt": [*once, *once, *once],
        "a result": [*once, 1, *once, *result, *once],
        "an early result": [*result, *once, 1, *once, 2, *once],
        "a result before": [*result, 0, *once, 1, *once, 2, *once],
        "padding": [-1] * (3 * NGRAM),
    }
    starts = {"of the prompt": NGRAM}
    marked = {
        name: repeats(np.array([text]), np.array([starts.get(name, 0)]), result)[0].nonzero()[0].tolist()
        for name, text in texts.items()
    }
    assert marked.pop("a loop") == list(range(2 * NGRAM + 3, 3 * NGRAM + 2))  # all but the first token
    assert marked.pop("a result before") == list(range(2 * NGRAM + 6, 3 * NGRAM + 5))
    assert marked.pop("a loop of one") == list(range(ALLOWED + 1, NGRAM + ALLOWED))
    assert not any(marked.values())
