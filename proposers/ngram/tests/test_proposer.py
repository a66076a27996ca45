"""Compares the drafts of the method `ngram` with a simple reference implementation's over many requests."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from obvious_ngram import Request, batch_of, drafts, proposer, reference

from specdec_testing import propose


def chain(context, budget=5, shortest=5, longest=5, match="last") -> list[int]:
    return drafts(proposer(shortest, longest, match), [Request("any", context)], [budget])[0]


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
        ([2**32 - 1, 0, 7, 2**32 - 1, 0], 2, 2, 2, [7, 2**32 - 1]),
    ],
)
def test_drafts(context, shortest, longest, budget, expected, match):
    assert chain(context, budget, shortest, longest, match) == expected


def test_first_and_last_differ_only_among_matches_of_one_length():
    context = [1, 2, 8, 1, 2, 9, 1, 2]
    assert chain(context, 2, 2, 2, "first") == [8, 1]
    assert chain(context, 2, 2, 2, "last") == [9, 1]
    for match in ("first", "last"):  # the longer match wins, though shorter ones lie on both sides of it
        assert chain([2, 7, 1, 2, 8, 5, 2, 9, 1, 2], 1, 1, 2, match) == [8]


def test_repeated_text_is_continued_to_the_budget_from_a_match_that_overlaps_the_suffix():
    assert chain([5] * 6, 4) == [5] * 4
    assert chain([5, 6] * 4, 5) == [5, 6, 5, 6, 5]


def test_requests_of_different_lengths_and_budgets_in_one_call():
    contexts = [[1, 2, 3, 1, 2], [4], list(range(9)), [7, 7, 7], [2, 5] * 20]
    requests = [Request(str(i), context) for i, context in enumerate(contexts)]
    result = proposer(1, 3).propose(batch_of(requests, [3, 5, 5, 1, 2]))
    assert result.offsets == (0, 3, 3, 3, 4, 6)
    assert [result.tree(i).token_ids for i in range(5)] == [[3, 1, 2], [], [], [7], [2, 5]]
    assert result.q_rows is None
    assert result.max_depth == 3


def test_no_requests():
    assert propose("ngram", []) == []


def test_drafts_of_earlier_steps_stay_as_they_were():
    request, ngram = Request("any", [1, 2, 1]), proposer(1, 1)
    before = ngram.propose(batch_of([request], [1]))
    request.tokens += [3, 1, 2, 3]
    ngram.propose(batch_of([request], [1]))
    assert before.token_ids.tolist() == [2]


def test_a_request_that_comes_again_with_the_same_tokens_gets_the_same_draft():
    """A request without new tokens, as after a preemption, gets the same draft as before."""
    for match, expected in (("last", [9]), ("first", [8])):
        request, ngram = Request("any", [1, 2, 8, 1, 2, 9, 1, 2]), proposer(1, 3, match)
        for _ in range(3):
            assert drafts(ngram, [request], [1]) == [expected]
            ngram.reset(request)


def test_nothing_is_left_of_a_finished_request():
    ngram = proposer(1, 1, max_num_requests=1)
    ngram.finish(Request("never drafted for"), "abort")
    for tokens, expected in (([1, 2, 1], [2]), ([1], []), ([3, 1], []), ([3, 1, 3], [1])):
        request = Request("one id", tokens)
        ngram.start(request)
        assert drafts(ngram, [request], [1]) == [expected]
        ngram.finish(request, "stop")


small = st.integers(0, 2)
large = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
texts = st.lists(small, max_size=60) | st.lists(large, max_size=30)
bounds = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=4), bounds, st.booleans(), st.data())
def test_equals_the_reference(parts, bounds, is_last, data):
    """Drafts equal those of the reference implementation.

    parts: parts[i][step] holds the tokens that are appended to request i in a step. A request with no part left is not
        in the batch.
    """
    match = "last" if is_last else "first"
    ngram, requests = proposer(*bounds, match), [Request(str(i)) for i in range(len(parts))]
    for step in range(max(map(len, parts))):
        asked = [i for i in range(len(parts)) if step < len(parts[i])]
        budgets = [data.draw(st.integers(1, 9)) for _ in asked]
        for i in asked:
            requests[i].tokens += parts[i][step]
        result = drafts(ngram, [requests[i] for i in asked], budgets)
        assert result == [reference(requests[i].tokens, *bounds, match, n) for i, n in zip(asked, budgets, strict=True)]


def lengthen(chance: random.Random, tokens: list[int], num_kinds: int) -> None:
    """Append 1 to 8 tokens to a list: random ones, a copy of earlier ones, or a repetition of the last few.

    num_kinds: number of distinct token ids.
    """
    num, kind = chance.randint(1, 8), chance.random()
    if kind < 0.3 or not tokens:
        tokens += [chance.randrange(num_kinds) for _ in range(num)]
    elif kind < 0.7:
        start = chance.randrange(len(tokens))
        tokens += tokens[start : start + num]
    else:
        period = chance.randint(1, 4)
        for _ in range(num):
            tokens.append(tokens[-min(period, len(tokens))])


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize(
    ("shortest", "longest", "num_kinds"),
    [(1, 1, 30), (1, 3, 3), (2, 2, 2), (2, 5, 4), (5, 5, 2), (3, 7, 1), (1, 100, 3), (30, 100, 1)],
)
def test_lives(shortest, longest, num_kinds, match):
    """Drafts equal those of the reference implementation while requests start, grow, are preempted and finish in random
    order, some with the id of a finished request."""
    chance, ngram, seen = random.Random(f"{shortest} {longest} {match}"), proposer(shortest, longest, match, 6), 0
    live: list[Request] = []
    for step in range(150):
        if len(live) < 6 and chance.random() < 0.3:
            name = next(str(i) for i in range(7) if str(i) not in {request.id for request in live})
            live.append(Request(name, [chance.randrange(num_kinds) for _ in range(chance.choice([1, 7, 70]))]))
            ngram.start(live[-1])
        for request in live:
            lengthen(chance, request.tokens, num_kinds)
        asked = [request for request in live if chance.random() < 0.8]
        budgets = [chance.randint(1, 9) for _ in asked]
        expected = [reference(r.tokens, shortest, longest, match, n) for r, n in zip(asked, budgets, strict=True)]
        assert drafts(ngram, asked, budgets) == expected, f"step {step}"
        seen += sum(map(bool, expected))
        for request in list(live):
            if chance.random() < 0.05:
                ngram.reset(request)
            if chance.random() < 0.03:
                live.remove(request)
                ngram.finish(request, chance.choice(["stop", "abort"]))
    assert seen > 100


def arrays_bytes() -> int:
    ours = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_memory_is_given_back():
    ngram = proposer(1, 4, max_num_requests=8)

    def load(seed: int) -> int:
        """Draft for eight requests that outgrow their memory, and finish them in random order. Returns the number of
        bytes of all arrays that are still allocated."""
        chance = random.Random(seed)
        requests = [Request(str(i), [chance.randrange(5) for _ in range(chance.randint(1, 300))]) for i in range(8)]
        while requests:
            for request in requests:
                request.tokens += [chance.randrange(5)] * chance.randint(1, 90)
            drafts(ngram, requests, [2] * len(requests))
            if chance.random() < 0.5:
                ngram.finish(requests.pop(chance.randrange(len(requests))), "stop")
        return arrays_bytes()

    once = load(0)
    assert [load(seed) for seed in range(20)] == [once] * 20


@pytest.mark.parametrize(("lengths", "num_bytes"), [((5, 5), 20), ((2, 5), 61)])
@pytest.mark.usefixtures("traced")
def test_memory_per_token(lengths, num_bytes):
    before = arrays_bytes()
    ngram, request = proposer(*lengths), Request("any", [i * i % 1009 for i in range(10_000)])
    for _ in range(2):
        drafts(ngram, [request], [1])
        assert arrays_bytes() - before < (num_bytes + 1) * len(request.tokens)  # as the README says
        request.tokens += [1] * 10_000


def test_long_texts_in_huge_pages():
    ngram, chance = proposer(2, 13), random.Random(0)
    requests = [Request(str(i), [chance.randrange(9) for _ in range(40_000)]) for i in range(3)]
    for _ in range(4):
        found = drafts(ngram, requests, [5] * len(requests))
        assert found == [reference(request.tokens, 2, 13, "last", 5) for request in requests]
        for request in requests:
            request.tokens += [chance.randrange(9) for _ in range(3)]
