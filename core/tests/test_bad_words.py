"""How the words of the sampling parameter bad_words become token ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec_core import ConfigError, EngineConfig, load_tokenizer
from specdec_core.sampling.bad_words import ANYTHING, BadWords, tokenize_words


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


@pytest.mark.parametrize(
    ("bare", "spaced", "found"),
    [
        ([4, 5], [9, 5], [[4, 5], [9, 5]]),
        ([4, 5], [4, 6, 7], [[4, 5], [4, 6, 7]]),
        ([4, 5], [9, 4, 5], [[4, 5]]),
        ([4, 5], [4, 5, 6], [[4, 5]]),
    ],
    ids=["another first token", "the same first token", "the same end", "the same beginning"],
)
def test_tokens_that_are_forbidden_anyway_are_left_out(bare, spaced, found):
    def tokenizer(text, add_special_tokens):
        return SimpleNamespace(input_ids=spaced if text.startswith(" ") else bare)

    assert tokenize_words(["word"], tokenizer) == found


def test_spaces_alone_are_no_word(tokenizer):
    with pytest.raises(ConfigError, match="bad_words has '  ', and spaces before a word are ignored: give a word"):
        tokenize_words(["values", "  "], tokenizer)


def test_they_are_prepared_once():
    """The newest token before the last one comes first, and words of one token are known."""
    found = BadWords.of([[7], [1, 2, 3], [4, 5]])
    assert found.last_ids.tolist() == [7, 3, 5]
    assert found.before.tolist() == [[ANYTHING, ANYTHING], [2, 1], [4, ANYTHING]]
    assert found.padded(3)[1].tolist() == [2, 1, ANYTHING]
    assert found.single_ids.tolist() == [7]
