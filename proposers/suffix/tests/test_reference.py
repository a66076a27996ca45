"""Tests that the reference implementation agrees with examples worked out by hand and with arctic-inference, and that
the random tests notice wrong drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest
from attrs import Factory, define, evolve, field
from suffix_fuzz import Drafted, Figures, Fuzz, Plan, Subject, View
from suffix_plans import NUM_OPERATIONS, PLANS, TREES
from suffix_reference import Options, Reference, Tree
from suffix_scanned import ScannedTree


def drafts(reference: Reference, key: str, budget: int = 9) -> list[list[int]]:
    return sorted([node.token_id for node in chain] for chain in reference.drafts(key, budget))


def test_by_hand():
    reference = Reference(Options(depth=4))
    reference.start("a", num_prompt_tokens=7)
    reference.extend("a", [1, 2, 3, 1, 2, 4, 1])
    assert drafts(reference, "a") == [[2]]  # 2 follows 1 in two of three occurrences, of which one ends the sequence
    (chain,) = reference.drafts("a", 9)
    assert chain[0].score == pytest.approx(2 / 3)
    reference.extend("a", [2])
    assert drafts(reference, "a") == [[3, 1], [4, 1]]  # a tie after 1 2: 1/3 + 1/3, against 1/3 after 2 alone
    assert reference.trees("a")[1].count((2,)) == 1  # of the global tree: only the output


def test_eviction_is_first_in_first_out_but_never_of_active_requests():
    reference = Reference(Options(depth=4, max_cached_requests=2))
    for key in "abc":
        reference.start(key, num_prompt_tokens=1)
        reference.extend(key, [1, ord(key)])
    assert len(reference.outputs) == 3
    reference.finish("b")
    assert list(reference.outputs.values()) == [[ord("a")], [ord("c")]]
    reference.finish("c")
    reference.finish("a")
    reference.start("b", num_prompt_tokens=1)
    assert list(reference.outputs.values()) == [[ord("a")], []]  # c was the first to finish
    reference.finish("b")
    assert list(reference.outputs.values()) == [[ord("a")]]
    assert reference.tree.following == {(): {ord("a"): 1}}
    assert reference.num_evicted == 2


@pytest.mark.parametrize("num_symbols", [2, 5])
def test_counting_by_looking_is_counting(num_symbols):
    random = Random(0)
    counted, scanned = Tree(4), ScannedTree(4)
    for length in (0, 1, 300, 7):
        sequences: list[list[int]] = [[], []]
        for token_id in random.choices(range(num_symbols), k=length):
            for tree, sequence in zip((counted, scanned), sequences, strict=True):
                tree.append(sequence, token_id)
        for n in range(1, 5):
            for string in product(range(num_symbols), repeat=n):
                assert scanned.count(string) == counted.count(string)
                assert n == 4 or scanned.counts_after(string) == counted.counts_after(string)


ALL = PLANS | TREES


def random_lives(plan: Plan, subject: Callable[[Plan], Subject], seed: int = 0) -> Figures:
    return Fuzz(plan, subject(plan), Random(seed)).run()


@pytest.fixture(scope="module")
def arctic():
    pytest.importorskip("arctic_inference", reason="its drafts are compared with the reference's where it is installed")
    import arctic_subject

    return arctic_subject


@pytest.mark.parametrize("name", ALL)
def test_arctic_agrees(arctic, name):
    plan = arctic.like_arctic(evolve(ALL[name], num_operations=max(NUM_OPERATIONS, 2000)))
    figures = random_lives(plan, arctic.ArcticSubject)
    assert figures.num_evicted > 0 or plan.options.max_cached_requests in (0, 50)
    assert plan.use_tree or figures.events["only one draft allowed"] > 0.75 * figures.events["draft"]


@pytest.mark.parametrize("difference", ["evicts", "matches_whole_context"])
def test_it_shows_where_arctic_differs(arctic, difference):
    ours = evolve(PLANS["two symbols"], longest_prompt=6, num_operations=3000)
    like_ours = {difference: getattr(ours.options, difference)}
    plan = arctic.like_arctic(ours)
    plan = evolve(plan, options=evolve(plan.options, **like_ours))
    with pytest.raises(AssertionError, match="allowed are"):
        random_lives(plan, arctic.ArcticSubject)


@define
class ReferenceSubject:
    """The reference implementation in the role of the proposer under test. It reads a request's new tokens in the same
    calls as a proposer."""

    plan: Plan
    reference: Reference = field(default=Factory(lambda self: Reference(self.plan.options), takes_self=True))

    def start(self, request: View) -> None:
        self.reference.start(request.id, request.num_prompt_tokens)
        self.catch_up(request)

    def propose(self, requests: Sequence[View], budgets: Sequence[int]) -> list[Drafted]:
        for request in requests:
            self.catch_up(request)
        return [self.draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def reset(self, request: View) -> None:
        pass

    def finish(self, request: View) -> None:
        self.catch_up(request)
        self.reference.finish(request.id)

    def catch_up(self, request: View) -> None:
        num_seen = len(self.reference.requests[request.id].tokens)
        self.reference.extend(request.id, request.token_ids[num_seen:].tolist())

    def draft(self, request: View, budget: int) -> Drafted:
        chain = min(self.reference.drafts(request.id, budget), key=repr)
        token_ids, scores = [node.token_id for node in chain], [node.score for node in chain]
        return Drafted(token_ids, list(range(-1, len(chain) - 1)), scores)


@pytest.mark.parametrize(
    "mistake",
    [
        {"depth": 7},
        {"max_cached_requests": 4},
        {"max_cached_requests": 0},
        {"factor": 0.75},
        {"offset": 1.0},
        {"min_prob": 0.3},
        {"evicts": "first started"},
        {"matches_whole_context": False},
    ],
)
def test_one_wrong_option_is_noticed(mistake):
    def mistaken(plan: Plan) -> ReferenceSubject:
        return ReferenceSubject(evolve(plan, options=evolve(plan.options, **mistake)))

    plan = evolve(PLANS["two symbols"], num_operations=4000)
    with pytest.raises(AssertionError, match="allowed are"):
        random_lives(plan, mistaken)


class ForgetsAtFinish(ReferenceSubject):
    def finish(self, request: View) -> None:
        self.reference.finish(request.id)


class DraftsBeforeAllCaughtUp(ReferenceSubject):
    def propose(self, requests: Sequence[View], budgets: Sequence[int]) -> list[Drafted]:
        return [super(type(self), self).propose([r], [b])[0] for r, b in zip(requests, budgets, strict=True)]


class StartsOverAtReset(ReferenceSubject):
    def reset(self, request: View) -> None:
        self.finish(request)
        self.start(request)


class PrefersShortMatches(ReferenceSubject):
    def draft(self, request: View, budget: int) -> Drafted:
        reference = self.reference
        for tree in reference.trees(request.id):
            for string in reference.matches(request.id, tree):
                chain = tree.chains(string, self.plan.options.max_nodes(len(string), budget), 0.1)[0]
                if chain:
                    token_ids, scores = [node.token_id for node in chain], [node.score for node in chain]
                    return Drafted(token_ids, list(range(-1, len(chain) - 1)), scores)
        return Drafted([], [], [])


class KeepsTheOrderOfStart(ReferenceSubject):
    def finish(self, request: View) -> None:
        super().finish(request)
        self.reference.outputs = dict(sorted(self.reference.outputs.items()))


@pytest.mark.parametrize(
    "subject",
    [ForgetsAtFinish, DraftsBeforeAllCaughtUp, StartsOverAtReset, PrefersShortMatches, KeepsTheOrderOfStart],
    ids=lambda subject: subject.__name__,
)
def test_a_mistake_is_noticed(subject):
    with pytest.raises(AssertionError, match="allowed are"):
        random_lives(evolve(PLANS["two symbols"], num_operations=4000), subject)
