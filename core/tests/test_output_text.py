"""Streamed pieces of text join to the whole text, wherever the stream is cut and wherever a stop string ends the
text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specdec_core import SamplingParams
from specdec_core.engine.detokenizer import OutputText

TEXT = "def größe(liste):\n    # 数える 🐍\n    return len(liste) + len(liste)\n"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


PARTS = st.tuples(st.integers(0, len(TEXT) - 1), st.integers(1, 12)).map(lambda part: TEXT[part[0] : sum(part)])
STOPS = st.lists(PARTS | st.text(min_size=1, max_size=20), max_size=3)


@given(stops=STOPS, includes=st.booleans(), num_context=st.integers(0, 8), chunk=st.integers(1, 4))
def test_pieces_make_the_whole(tokenizer: Any, stops: list[str], includes: bool, num_context: int, chunk: int) -> None:
    token_ids = tokenizer(TEXT).input_ids
    full = tokenizer.decode(token_ids)  # the tokenizer of the tests has no bytes: letters that it lacks are left out
    params = SamplingParams(stop=stops, include_stop_str_in_output=includes)
    text = OutputText(tokenizer, np.array(token_ids[:num_context], dtype=np.int64), params)
    given_out = ""
    for start in range(0, len(token_ids), chunk):
        given_out += text.add(token_ids[start : start + chunk])
        assert text.text.startswith(given_out)
        if text.is_stopped:
            break
    given_out += text.finish()
    assert given_out == text.text
    found = [full.find(stop) for stop in stops if stop in full]
    if not found:
        assert (text.text, text.stop_string) == (full, None)
        return
    assert text.stop_string in stops
    end = text.text.find(text.stop_string)
    assert (end >= 0) == includes
    assert full.startswith(text.text)
    assert text.text.removesuffix(text.stop_string) == full[: full.find(text.stop_string)]


def test_of_stop_strings_that_come_at_once_the_one_that_begins_first_counts(tokenizer: Any) -> None:
    for stops, ended in ((["liste", "return"], "liste"), (["len(liste", "len("], "len("), (["gr", "def gr"], "def gr")):
        text = OutputText(tokenizer, np.array([], dtype=np.int64), SamplingParams(stop=stops))
        text.add(tokenizer(TEXT).input_ids)
        assert text.stop_string == ended


def test_a_stop_string_longer_than_the_text_holds_all_of_it_back(tokenizer: Any) -> None:
    text = OutputText(tokenizer, np.array([], dtype=np.int64), SamplingParams(stop="x" * 50))
    assert "".join(text.add([token_id]) for token_id in tokenizer("return").input_ids) == ""
    assert text.finish() == "return"


@given(stops=st.lists(PARTS, min_size=1, max_size=3), min_tokens=st.integers(0, 25), includes=st.booleans())
def test_a_stop_string_within_the_first_tokens_is_text(
    tokenizer: Any, stops: list[str], min_tokens: int, includes: bool
) -> None:
    """Within the first min_tokens tokens a stop string is ordinary text. It ends the output only if a later token
    completes it."""
    token_ids = tokenizer(TEXT).input_ids
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=includes)
    text = OutputText(tokenizer, np.array([], dtype=np.int64), params)
    for taken, token_id in enumerate(token_ids, 1):
        text.add([token_id])
        before, full = (tokenizer.decode(token_ids[:n]) for n in (max(taken - 1, min_tokens), taken))
        expected = taken > min_tokens and any(full.find(s, max(0, len(before) - len(s) + 1)) >= 0 for s in stops)
        assert text.is_stopped == expected
        if text.is_stopped:
            return
    text.finish()
    assert text.text == tokenizer.decode(token_ids)
