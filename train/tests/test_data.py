"""Reading, splitting and ordering of training texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core import ConfigError
from specdec_train.batches import Order, collate
from specdec_train.data import Text, Window, cut, fingerprint, join, read_texts, token_counts, windows
from specdec_train.generate import beginning
from specdec_train.store import TOKENS_PER_SHARD, _layout


class Letters:
    """A tokenizer of lower-case letters that begins each text with token 26."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [26] * add_special_tokens + [ord(letter) - ord("a") for letter in text]}


def read(path, **kwargs):
    return [
        (text.token_ids.tolist(), text.counts.tolist())
        for text in read_texts([path], kwargs.get("tokenizer", Letters()), kwargs.get("vocab_size", 27))
    ]


def test_a_folder_of_everything(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_text("no letters")
    (tmp_path / "a.txt").write_text("abc")
    lines = [{"text": "ba"}, {"prompt": "a", "completion": "cc"}]
    (tmp_path / "b" / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    np.save(tmp_path / "b" / "d.npy", np.array([[1, 2, -1], [3, -1, -1]]))
    assert read(tmp_path) == [
        ([26, 0, 1, 2], [True] * 4),
        ([26, 1, 0], [True] * 3),
        ([26, 0, 2, 2], [False, False, True, True]),
        ([1, 2], [True] * 2),
        ([3], [True]),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"words": "a"}', "line 2 is .* give an object with a text, or with a prompt"),
        ("a.jsonl", b"abc", "line 1 is 'abc', which is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 has a text that is not text: character 0 is half of a pair"),
        ("a.txt", b"\xff\xfe\xfd", "is not UTF-8 text"),
        ("a.npy", b"abc", "cannot be read"),
        ("a.npy", b"", "cannot be read"),
    ],
)
def test_what_cannot_be_read(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_what_is_no_data(tmp_path):
    with pytest.raises(ConfigError, match="is an empty folder"):
        read(tmp_path)
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(ConfigError, match=r"is float64 \[3\]: give integers"):
        read(tmp_path / "a.npy")


def test_what_is_no_array(tmp_path):
    with (tmp_path / "a.npy").open("wb") as file:
        np.savez(file, ids=np.arange(8))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "a.npy")


@pytest.mark.parametrize("wrong", [np.int64(2**31), np.int64(2**32 + 5), np.uint64(2**63 + 5)])
def test_ids_do_not_wrap_around(wrong, tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, wrong], dtype=wrong.dtype))
    with pytest.raises(ConfigError, match=f"has {wrong}, which is not a token id"):
        read(tmp_path / "a.npy")


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(8, 20))
def test_cutting_loses_only_ends(lengths, length):
    texts = [Text(np.arange(n, dtype=np.int32) + 100 * i, np.ones(n, dtype=bool)) for i, n in enumerate(lengths)]
    pieces = cut(texts, length)
    assert all(4 <= len(piece.token_ids) <= length for piece in pieces)
    kept = [token for piece in pieces for token in piece.token_ids.tolist()]
    wanted = [t for text in texts for t in text.token_ids.tolist()[: len(text.token_ids) // length * length]]
    assert set(wanted) <= set(kept)
    assert len(set(kept)) == len(kept)


def test_what_is_continued():
    ids, none = np.arange(8, dtype=np.int32), np.arange(0, dtype=np.int32)
    plain = Text(ids, np.ones(8, dtype=bool))
    for text, wanted in ((plain, 3), (join(ids[:5], ids[5:]), 5), (join(ids, none), 8)):
        assert len(beginning(text, prompt_len=3)) == wanted


def test_a_prompt_alone_is_not_learned():
    text = join(np.arange(8, dtype=np.int32), np.arange(3, dtype=np.int32))
    assert [len(piece.token_ids) for piece in cut([text], 8)] == []
    assert [len(piece.token_ids) for piece in cut([text], 11)] == [11]
    assert token_counts([text], 12).tolist() == [1, 1, 1] + [0] * 9


def test_windows_without_labels_are_dropped():
    text = join(np.arange(8, dtype=np.int32), np.arange(20, dtype=np.int32))
    assert windows([text, text], 9) == [Window(row, start, start + 9) for row in (0, 1) for start in (0, 9, 18)]
    assert windows([text], 8) == [Window(0, 8, 16), Window(0, 16, 24), Window(0, 24, 28)]
    assert windows([text], None) == [Window(0, 0, 28)]
    with pytest.raises(ConfigError, match="window=8 splits the texts such that no part has a label"):
        windows([join(np.arange(8, dtype=np.int32), np.arange(2, dtype=np.int32))], 8)


@settings(deadline=None)
@given(st.lists(st.integers(4, 30), min_size=1, max_size=80), st.integers(1, 5), st.integers(0, 5))
def test_an_epoch_has_no_text_twice_and_few_are_left_out(lengths, batch, seed):
    order = Order(tuple(lengths), batch, seed)
    per_epoch = order.batches_per_epoch
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        rows = [row for step in steps for row in order.rows(step)]
        assert len(set(rows)) == len(rows) == min(len(lengths), per_epoch * batch)
        assert [order.rows(step) for step in steps] == [Order(tuple(lengths), batch, seed).rows(s) for s in steps]


@pytest.mark.parametrize("number", [15, 100])
def test_texts_that_an_epoch_leaves_out_are_in_others(number):
    """Not always the longest ones, which sorting puts into the incomplete batch."""
    order = Order(tuple(range(4, 4 + number)), 8, 0)
    assert len({row for step in range(50 * order.batches_per_epoch) for row in order.rows(step)}) == number


def test_epochs_have_different_orders():
    order = Order((10,) * 64, 4, 0)
    assert [order.rows(step) for step in range(16)] != [order.rows(step) for step in range(16, 32)]
    assert order.rows(0) != Order((10,) * 64, 4, 1).rows(0)


def test_padding_counts_for_nothing():
    texts = [Text(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool)) for ids in ([1, 2, 3], [4])]
    token_ids, counts = collate(texts, torch.device("cpu"))
    assert token_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert counts.tolist() == [[True] * 3, [True, False, False]]


@given(st.lists(st.integers(1, TOKENS_PER_SHARD + 9), min_size=1, max_size=9))
def test_shards_follow_each_other(lengths):
    shards, starts = _layout(lengths)
    assert [row for first, last in shards for row in range(first, last)] == list(range(len(lengths)))
    for first, last in shards:
        assert starts[first:last] == np.cumsum([0, *lengths[first:last]])[:-1].tolist()
        assert sum(lengths[first:last]) <= TOKENS_PER_SHARD or last - first == 1


def test_every_difference_changes_the_fingerprint():
    def of(ids, counts):
        return fingerprint([Text(np.array(ids, dtype=np.int32), np.array(counts, dtype=bool))])

    found = {of([1, 2], [True, True]), of([1, 3], [True, True]), of([1, 2], [True, False]), of([1], [True])}
    assert len(found) == 4
