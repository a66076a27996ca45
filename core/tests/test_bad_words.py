"""How the words of the sampling parameter bad_words become token ids."""

from __future__ import annotations

import pytest

from specdec_core import ConfigError, EngineConfig, load_tokenizer
from specdec_core.sampling.bad_words import tokenize_words


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EngineConfig(model="tiny"))


@pytest.mark.parametrize("word", ["self", "GH", "  GH", "values", "mean(values)", "42", "("])
def test_both_with_a_space_and_without_are_found(word, tokenizer):
    """The output may have a word after a space, whose tokens may differ in number from those of the word alone."""
    found = tokenize_words([word], tokenizer)
    for text in (word.lstrip(), f" {word.lstrip()}"):
        written = tokenizer(text, add_special_tokens=False).input_ids
        assert any(written[-len(ids) :] == ids for ids in found), text


def test_spaces_alone_are_no_word(tokenizer):
    with pytest.raises(ConfigError, match="bad_words has '  ', and spaces before a word are ignored: give a word"):
        tokenize_words(["values", "  "], tokenizer)
