"""Checks of randomness: drafts depend only on a request's own tokens and seed, and sampled draft tokens follow the
distributions that the draft declares in `Draft.q`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from specdec_core.contracts.draft import DEAD
from specdec_testing.conformance import faults as rules
from specdec_testing.conformance.coupling import SampledNode, coupled
from specdec_testing.conformance.faults import Node
from specdec_testing.conformance.recording import Asked, Proposal
from specdec_testing.conformance.runs import Run
from specdec_testing.conformance.situations import Situations

MOST_DEVIATIONS = 4.5
"""Standard deviations between a mean and its expectation that are not chance (1 in 100,000). The draws are the same in
every run of the kit."""


Score = Callable[[torch.Tensor], torch.Tensor]
"""A statistic: probabilities of all tokens, float64 [vocab] -> the value of each token, float64 [vocab]."""


def signs(seed: int) -> Score:
    """Return a score function that gives each token id 1 or -1 at random, independent of its probability.

    This score detects a proposer that always takes the same one of several equally likely tokens. Scores that depend
    only on a token's probability cannot detect that.
    """

    def of_tokens(probs: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.randint(2, probs.shape, generator=torch.Generator().manual_seed(seed)).double() - 1

    return of_tokens


SCORES: dict[str, Score] = {"probability": torch.clone, "log-probability": torch.log}
SCORES |= {f"sign (of {seed + 1})": signs(seed) for seed in range(4)}


def difference(situations: Situations, other: Run, *, only_after_reset: bool = False) -> str | None:
    """Compare a run's drafts with the drafts of the kit's greedy and sampled runs for requests in the same state.

    Returns a text that shows the first two drafts that differ. None if all are equal.

    other: the run to compare with the greedy and sampled runs.
    only_after_reset: whether to compare only drafts for requests that had been preempted.
    """
    known = situations.greedy.drafts() | situations.sampled.drafts()
    return first_difference(known, other.drafts(only_after_reset=only_after_reset))


def first_difference(known: Mapping[Asked, Any], then: Mapping[Asked, Any]) -> str | None:
    """Compare the drafts of two runs (from `Run.drafts`) for requests in the same state. States that only one run had
    are ignored. Returns a text that shows the first two drafts that differ. None if all are equal."""
    for asked, draft in then.items():
        if asked in known and known[asked] != draft:
            return f"\nasked: {asked}\nfirst: {known[asked]}\nthen:  {draft}"
    return None


def skip_unless_repeatable(situations: Situations) -> None:
    """Skip the current test if the proposer drafts differently in two runs with equal requests and seeds. Tests that
    compare drafts of different runs call this first."""
    if difference(situations, situations.sampled_again):
        pytest.skip("its drafts differ from run to run: see test_same_tokens_same_draft")


def skip_unless_independent(situations: Situations) -> None:
    skip_unless_repeatable(situations)
    if difference(situations, situations.rearranged):
        pytest.skip("its drafts depend on the batch: see test_batch_does_not_matter")


class ChanceChecks:
    learns: ClassVar[bool] = False

    def test_same_tokens_same_draft(self, specdec_situations: Situations) -> None:
        """Two runs with equal requests and seeds give equal drafts.

        A proposer must take all random numbers from batch.random, which depends on the request's seed. If it takes them
        from elsewhere (torch, numpy, the order of a set of strings, the time), users cannot reproduce its drafts.
        """
        found = difference(specdec_situations, specdec_situations.sampled_again)
        assert not found, f"draw with batch.random only; two equal runs drafted differently{found}"

    def test_batch_does_not_matter(self, specdec_situations: Situations) -> None:
        """A request gets the same draft whether it is alone in the batch or among other requests, in any order.

        A proposer must keep a request's state under the request's id, never under its index in the batch, and must not
        mix the tokens of different requests.
        """
        skip_unless_repeatable(specdec_situations)
        found = difference(specdec_situations, specdec_situations.rearranged)
        assert not found, (
            f"the draft for a request changed with the requests around it: keep state under the request's id, or skip "
            f"this test if requests share state on purpose{found}"
        )

    def test_sampled_nodes_exist_whatever_they_are(self, specdec_situations: Situations) -> None:
        """Whether a sampled draft token is in the tree never depends on the token itself.

        A proposer may stop, prune or merge before it samples a token. Once it has sampled the token, it must keep it:
        dropping an unlikely token (or marking it as padding, parent -2) changes the distribution that rejection
        sampling relies on. The test drafts after the same tokens with many seeds. After equal draft tokens, the next
        sampled token must exist for all seeds or for none, and must be sampled from the same distribution (row of
        `Draft.q`).
        """
        faults = list(existence_faults(_sampled(specdec_situations), learns=self.learns))
        assert not faults, faults[0]

    def test_sampled_tokens_follow_q(self, specdec_situations: Situations) -> None:
        """Sampled draft tokens are distributed as their row of `Draft.q` specifies, after temperature.

        The test scores each sampled token by its probability, by its log-probability and by random signs (1 or -1 per
        token id). Over many seeds, the mean scores must be as expected under `q`. A token that was picked
        deterministically, such as the likeliest one, needs no row of `q` and has -1 in Draft.q_rows.
        """
        drafts = _sampled(specdec_situations)
        if any(existence_faults(drafts, learns=self.learns)):
            pytest.skip("some nodes are dropped by their tokens: see test_sampled_nodes_exist_whatever_they_are")
        for kind, score in SCORES.items():
            deviations = excess(drafts, score)
            assert abs(deviations) <= MOST_DEVIATIONS, (
                f"the mean {kind} of what was drawn is {deviations:.1f} standard deviations from what q says: give the "
                f"distribution that the nodes were drawn from, after temperature, and draw with "
                f"batch.random.categorical; nodes that were not drawn, such as the likeliest tokens, are chosen ones, "
                f"without a row of q"
            )

    def test_sampled_tokens_are_drawn_with_own_noise(self, specdec_situations: Situations) -> None:
        """Sampled draft tokens are drawn with `Stream.DRAFT`, not with the noise of the target or of the verifier.

        Rejection sampling needs draft tokens that are independent of its own draws and of the target's. Tokens that
        were drawn with the target's noise (`Stream.TARGET`, `target_token`) agree with the target more often, but the
        output would be biased. As chosen nodes, without a row of `Draft.q`, they are correct.
        """
        nodes = [node for draft in _sampled(specdec_situations) for node in _drawn(draft)]
        for noise, index, deviations in coupled(nodes):
            assert deviations <= MOST_DEVIATIONS, (
                f"a sampled node is drawn with noise of its own; node {index} agrees {deviations:.1f} standard "
                f"deviations too often with what {noise} would draw: draw with batch.random.categorical and "
                f"Stream.DRAFT, or give such nodes no row of q (q_rows -1), as chosen ones"
            )


Trees = tuple[tuple[tuple[int, int], ...], ...]
"""For several trees, the (parent, token id) of each node."""


class SeededDraft(NamedTuple):
    """The draft tree of one request, drafted with the seed in `asked`.

    proposal: the recorded call of `propose` that returned the tree.
    asked: the state of the request at that call.
    tree: the nodes of the tree.
    """

    proposal: Proposal
    asked: Asked
    tree: list[Node]


def _sampled(situations: Situations) -> list[SeededDraft]:
    """Return the drafts for requests with the same prompt and different seeds (`workload.many_seeds`). Drafts that
    break another rule are left out. Skips the test if the proposer samples no draft token."""
    sound = [p for p in situations.proposals if not any(rules.faults_of(p))]
    if not any(node.q_row >= 0 for p in sound for tree in rules.trees(p) for node in tree):
        pytest.skip("none of its nodes is sampled from a distribution, so that q is not given")
    proposals = [p for p in situations.many_seeds.journal.proposals if not any(rules.faults_of(p))]
    return [SeededDraft(p, *pair) for p in proposals for pair in zip(p.asked, rules.trees(p), strict=True)]


def draws(draft: SeededDraft) -> Iterator[tuple[Node, torch.Tensor]]:
    """Yield each sampled draft token with the distribution, float64 [vocab], that it was sampled from. If siblings are
    sampled without replacement, earlier siblings have probability 0 in it."""
    left: dict[int, torch.Tensor] = {}
    for node in rules.live(draft.tree):
        if node.q_row >= 0:
            probs = left.get(node.parent, rules.target_probs(draft.proposal, node.q_row))
            yield node, probs
            if not draft.proposal.draft.with_replacement:
                probs = probs.clone()
                probs[node.token_id] = 0
            left[node.parent] = probs / probs.sum()


def _drawn(draft: SeededDraft) -> Iterator[SampledNode]:
    """Yield the sampled draft tokens of a tree, with the columns of `Draft.q` that they were drawn from."""
    given, depths = draft.proposal.draft, rules.depths(draft.tree)
    assert given.q is not None
    left: dict[int, torch.Tensor] = {}
    for node in rules.live(draft.tree):
        if node.q_row >= 0:
            ids = given.q_to_target if given.q_ids is None else given.q_ids[node.q_row]
            column = node.token_id if ids is None else int((ids == node.token_id).nonzero()[0])
            weights = left.get(node.parent, given.q[node.q_row].double())
            root = len(draft.asked.token_ids) - 1
            yield SampledNode(draft.asked.seed, root, node.index, depths[node.index] - 1, weights, column)
            if not given.with_replacement:
                weights = weights.clone()
                weights[column] = 0
            left[node.parent] = weights


def excess(drafts: list[SeededDraft], score: Score) -> float:
    """Return by how many standard deviations the total score of all sampled draft tokens exceeds its expectation under
    their rows of `Draft.q`. Negative if the total is below the expectation."""
    total = variance = 0.0
    for draft in drafts:
        for node, probs in draws(draft):
            scores = score(probs.clamp(min=1e-12))
            mean = float((probs * scores).sum())
            total += float(scores[node.token_id]) - mean
            variance += float((probs * (scores - mean) ** 2).sum())
    return total / math.sqrt(max(variance, 1e-9))


def first_decided(tree: list[Node]) -> list[Node | None]:
    """Return those nodes of a draft tree whose drafting order is known.

    For a chain, these are all nodes that are not padding, followed by None for the end of the chain. For any other
    tree, it is only the first node, or None if that node is padding.
    """
    alive = [node for node in tree if node.parent != DEAD]
    above = [-1, *(node.index for node in alive)]
    if all(node.parent == parent for node, parent in zip(alive, above, strict=False)):
        return [*alive, None]
    return [None if tree[0].parent == DEAD else tree[0]]


def existence_faults(drafts: list[SeededDraft], *, learns: bool) -> Iterator[str]:
    """Yield an error message for each position where a sampled draft token exists for some seeds only, or where its row
    of `Draft.q` differs between seeds.

    Drafts are compared only if their requests have the same tokens. Two chains are compared up to the first token in
    which they differ. Of any other tree, only the first node is compared, because the drafting order of the rest is
    unknown.

    learns: whether drafts may also depend on how many of the request's earlier draft tokens were accepted. If so, only
        requests with equal earlier drafts are compared.
    """
    same: dict[tuple[tuple[int, ...], Trees, tuple[int, ...]], list[tuple[SeededDraft, Node | None]]]
    same, earlier = defaultdict(list), defaultdict[int, Trees](tuple)
    for draft in drafts:
        path: tuple[int, ...] = ()
        for node in first_decided(draft.tree):
            same[draft.asked.token_ids, earlier[draft.asked.seed], path].append((draft, node))
            path += (node.token_id,) if node is not None else ()
        if learns:
            earlier[draft.asked.seed] += (tuple((node.parent, node.token_id) for node in draft.tree),)
    for (tokens, _, path), found in same.items():
        where = f"after {tokens[-8:]} and the draft tokens {path}"
        kinds = {node is not None and node.q_row >= 0 for _, node in found}
        if {node is None for _, node in found} == {True, False} and True in kinds:
            yield f"{where} there is a sampled node for some seeds and none for others: its own token must not decide"
        rows = [rules.target_probs(draft.proposal, node.q_row) for draft, node in found if node and node.q_row >= 0]
        if any(not torch.allclose(row, rows[0], atol=1e-3) for row in rows):
            yield f"{where} q differs from seed to seed: it must not depend on the token that was drawn from it"
