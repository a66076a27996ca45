"""The drafts of `ngram` against the most obvious way to write the same thing."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core import Draft, ProposerBatch
from specdec_core.testing import SimpleRequest
from specdec_proposer_ngram import NgramConfig, proposer


def reference(context: list[int], shortest: int, longest: int, match: str, budget: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        if n > len(context):
            continue
        suffix = context[len(context) - n :]
        ends = [end for end in range(n, len(context)) if context[end - n : end] == suffix]
        if ends:
            end = ends[0] if match == "first" else ends[-1]
            text = list(context)
            for i in range(budget):  # drafted tokens are context for those after them
                text.append(text[end + i])
            return text[len(context) :]
    return []


def draft(contexts, budgets, shortest=5, longest=5, match="last", module=proposer) -> Draft:
    requests = [SimpleRequest(id=str(i), token_ids=context) for i, context in enumerate(contexts)]
    batch = ProposerBatch(
        requests=requests,
        root_token_ids=torch.tensor([c[-1] if c else 0 for c in contexts], dtype=torch.int64),
        root_positions=torch.tensor([len(c) - 1 for c in contexts], dtype=torch.int64),
        temperature=torch.zeros(len(contexts)),
        max_draft_tokens=tuple(budgets),
        random=None,  # chosen tokens only
    )
    config = NgramConfig(shortest, longest, match)
    return module.NgramProposer(config, torch.device("cpu")).propose(batch)


def chain(context, budget=5, shortest=5, longest=5, match="last") -> list[int]:
    return draft([context], [budget], shortest, longest, match).token_ids.tolist()


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize(
    ("context", "shortest", "longest", "budget", "expected"),
    [
        ([], 1, 5, 5, []),
        ([3], 1, 5, 5, []),
        ([3, 4], 1, 5, 5, []),
        ([3, 3], 1, 1, 1, [3]),
        ([1, 2, 3], 3, 3, 5, []),  # the suffix is the whole context
        ([1, 2, 1, 2], 3, 3, 5, []),
        ([1, 2, 3, 1, 2], 2, 2, 1, [3]),
        ([1, 2, 3, 4, 1, 2], 5, 5, 4, []),
        ([1, 2, 3, 4, 1, 2], 1, 5, 4, [3, 4, 1, 2]),  # longer than any suffix that occurs: falls back to 2
        ([1, 2, 3, 1, 2], 2, 2, 7, [3, 1, 2, 3, 1, 2, 3]),  # period 3
        ([2**31, 5, 2**31 - 1, 2**31, 5], 2, 2, 2, [2**31 - 1, 2**31]),
    ],
)
def test_drafts(context, shortest, longest, budget, expected, match):
    assert chain(context, budget, shortest, longest, match) == expected


def test_first_and_last_differ_only_among_matches_of_one_length():
    context = [1, 2, 8, 1, 2, 9, 1, 2]
    assert chain(context, 2, 2, 2, "first") == [8, 1]
    assert chain(context, 2, 2, 2, "last") == [9, 1]
    for match in ("first", "last"):  # the longer one wins, though leftmost and most recent matches of 1 surround it
        assert chain([2, 7, 1, 2, 8, 5, 2, 9, 1, 2], 1, 1, 2, match) == [8]


def test_repeated_text_is_continued_to_the_budget_from_a_match_that_overlaps_the_suffix():
    assert chain([5] * 6, 4) == [5] * 4
    assert chain([5, 6] * 4, 5) == [5, 6, 5, 6, 5]


def test_requests_of_different_lengths_and_budgets_in_one_call():
    contexts = [[1, 2, 3, 1, 2], [4], list(range(9)), [7, 7, 7], [2, 5] * 20]
    result = draft(contexts, [3, 5, 5, 1, 2], 1, 3)
    assert result.offsets == (0, 3, 3, 3, 4, 6)
    assert [result.tree(i).token_ids for i in range(5)] == [[3, 1, 2], [], [], [7], [2, 5]]
    assert result.tree(0).parents == [-1, 0, 1]
    assert result.q_rows is None
    assert result.max_depth == 3


def test_tokens_the_engine_may_still_append_to():
    buffer = np.array([1, 2, 3, 1, 2, 9, 9], dtype=np.int64)
    for writeable in (True, False):
        buffer.setflags(write=writeable)
        assert proposer.find_continuation(buffer[:5], 2, 2, True) == 2


small = st.integers(0, 2)
large = st.sampled_from([0, 1, 2**31 - 1, 2**31, -1])
contexts = st.lists(st.lists(small, max_size=60) | st.lists(large, max_size=30), min_size=1, max_size=4)
bounds = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)


@settings(max_examples=300, deadline=None)
@given(contexts, bounds, st.sampled_from(["first", "last"]), st.data())
def test_equals_the_reference(contexts, bounds, match, data):
    budgets = data.draw(st.lists(st.integers(1, 9), min_size=len(contexts), max_size=len(contexts)))
    result = draft(contexts, budgets, *bounds, match)
    for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
        assert result.tree(i).token_ids == reference(context, *bounds, match, budget)


def first_difference(module) -> object:
    """Every text of two tokens up to length 7, with every bound up to 3: what differs from the reference, if any."""
    texts = [list(text) for length in range(8) for text in product((0, 1), repeat=length)]
    for (shortest, longest), match in product([(1, 1), (1, 3), (2, 3), (3, 3)], ["first", "last"]):
        result = draft(texts, [4] * len(texts), shortest, longest, match, module)
        for i, text in enumerate(texts):
            if result.tree(i).token_ids != reference(text, shortest, longest, match, 4):
                return text, shortest, longest, match
    return None


SOURCE = Path(proposer.__file__).read_text().replace("@compiled\n", "")
MUTATIONS = [
    ("range(1, num_tokens)", "range(2, num_tokens)"),  # misses the match next to the suffix
    ("range(1, num_tokens)", "range(1, num_tokens - 1)"),  # misses the match farthest away
    ("end = num_tokens - i if most_recent else i", "end = i if most_recent else num_tokens - i"),
    ("min(longest, end)", "min(longest, end - 1)"),  # no match at the beginning
    ("min(longest, end)", "min(longest, num_tokens)"),  # reads before the beginning
    ("length > start_length", "length >= start_length"),  # the last one found, and too short ones
    ("shortest - 1", "shortest"),
    ("shortest - 1", "0"),  # ignores the lower bound
    ("if length == longest:", "if length >= shortest:"),  # settles for a shorter match
    ("tokens[start : start + budget]", "tokens[start - 1 : start - 1 + budget]"),
    ("cycle(continuation)", "continuation"),  # stops at the end of the context
]


def variant(old: str = "", new: str = ""):
    assert old in SOURCE
    namespace: dict[str, object] = {"__name__": "variant"}
    exec(SOURCE.replace(old, new), namespace)
    return type("Variant", (), namespace)


def test_all_small_texts_equal_the_reference():
    assert first_difference(proposer) is None
    assert first_difference(variant()) is None


@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_a_wrong_algorithm_is_caught(old, new):
    assert first_difference(variant(old, new)) is not None


def test_compiles_where_no_cache_can_be_written():
    without_file = variant().find_continuation  # numba finds no place for the cache of code that is in no file
    assert proposer.compiled(without_file)(np.array([1, 2, 3, 1, 2]), 2, 2, True) == 2
