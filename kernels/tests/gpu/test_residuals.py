"""Residual distributions computed by Triton kernels, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given, settings, strategies as st

from specdec_core.ops.residuals import Proposals
from specdec_kernels.gpu import OPS
from specdec_kernels.gpu.residuals import PART

VOCABS = [2, 7, 50, 1024, PART - 1, PART, PART + 1, 2 * PART + 101]
KINDS = ["dense", "q_to_target", "q_ids"]


@frozen
class Case:
    """Parents with draft tokens below them: those of a parent are siblings. Row 0 of the logits is a parent."""

    logits: torch.Tensor
    proposals: Proposals

    @property
    def nodes(self) -> torch.Tensor:
        return (self.proposals.parent_rows[:-1] < self.proposals.end).nonzero().squeeze(1)

    def made(self) -> Any:
        return OPS["residuals"](self.logits, self.proposals)


def case(
    seed: int,
    vocab: int,
    num_parents: int,
    num_siblings: int,
    kind: str,
    *,
    replaced: bool = False,
    chosen: float = 0.2,
) -> Case:
    """Random logits and q of which some are impossible. Siblings are different tokens, of one row of q; the last ones
    may be deterministic (not sampled), a share of `chosen`.

    replaced: whether siblings were drawn with replacement, so that earlier ones are not taken out.
    """
    random = np.random.default_rng(seed)
    num_siblings = min(num_siblings, vocab - 1)
    end = num_parents * (1 + num_siblings)
    logits = random.normal(0, 3, (end, vocab)).astype(np.float32)
    logits[random.random((end, vocab)) < 0.2] = -np.inf
    logits[:, random.integers(vocab)] = 1
    width = vocab if kind == "dense" else max(num_siblings, vocab // 3)
    q = random.random((num_parents, width)).astype(np.float32) ** 4 + 1e-6
    ids = np.stack([random.permutation(vocab)[:width] for _ in range(1 if kind == "q_to_target" else num_parents)])
    tokens_of_q = np.broadcast_to(np.arange(vocab) if kind == "dense" else ids, (num_parents, width))

    token_ids, q_rows = np.zeros(end + 1, dtype=np.int64), np.full(end + 1, -1)
    parents = np.full(end + 1, end)
    earlier = np.full((end + 1, 0 if replaced else num_siblings - 1), end)
    for parent in range(num_parents):
        first = num_parents + parent * num_siblings
        drawn = random.permutation(tokens_of_q[parent])[:num_siblings]
        for i, node in enumerate(range(first, first + num_siblings)):
            token_ids[node], parents[node] = drawn[i], parent
            q_rows[node] = -1 if random.random() < chosen else parent
            if not replaced:
                earlier[node, :i] = np.arange(first, node)
    given = (torch.from_numpy(each) for each in (token_ids, parents, q_rows, earlier))
    proposals = Proposals(
        end,
        vocab,
        *given,
        q=torch.from_numpy(q),
        q_to_target=torch.from_numpy(ids[0]) if kind == "q_to_target" else None,
        q_ids=torch.from_numpy(ids) if kind == "q_ids" else None,
    )
    return Case(torch.from_numpy(logits), proposals)


class Exact:
    """The definition, in float64."""

    def __init__(self, case: Case) -> None:
        self.given = case.proposals
        with np.errstate(invalid="ignore", over="ignore"):
            logits = case.logits.double().numpy()
            exps = np.exp(logits - logits.max(axis=1, keepdims=True))
            self.left = exps / exps.sum(axis=1, keepdims=True)

    def drawn(self, node: int) -> np.ndarray:
        given, vocab = self.given, self.given.vocab_size
        q_row, found = int(given.q_rows[node]), np.zeros(vocab)
        if q_row < 0:
            found[given.token_ids[node]] = 1
            return found
        tokens = np.arange(vocab) if given.q_to_target is None else given.q_to_target.numpy()
        tokens = tokens if given.q_ids is None else given.q_ids[q_row].numpy()
        found[tokens] = given.q[q_row].double().numpy()
        for sibling in given.earlier[node]:
            if sibling < given.end:
                found[given.token_ids[sibling]] = 0
        return found / found.sum()

    def ratio(self, node: int) -> float:
        token = int(self.given.token_ids[node])
        return float(self.left[self.given.parent_rows[node], token] / self.drawn(node)[token])

    def rest(self, node: int, scale: float) -> np.ndarray:
        return np.maximum(0, scale * self.left[self.given.parent_rows[node]] - self.drawn(node))

    def refuse(self, node: int, scale: float) -> float:
        rest = self.rest(node, scale)
        if rest.sum() > 0:
            self.left[self.given.parent_rows[node]] = rest / rest.sum()
        return float(rest.sum())


def assert_close(found: torch.Tensor, expected: Any, scale: float | np.ndarray = 0.0) -> None:
    """scale: what was subtracted from. Of a difference of logits up to 16, rounding to float32 takes 5e-7, and its
    exponential is as far off."""
    expected = np.array(expected, dtype=np.float64)
    found = found.double().numpy()
    assert (np.abs(found - expected) <= 1e-5 * expected + 6e-7 * scale).all(), (found, expected)


@settings(max_examples=25, deadline=None)
@example(vocab=8293, num_parents=1, num_siblings=3, kind="q_to_target", replaced=False, seed=1)
@given(
    vocab=st.sampled_from(VOCABS),
    num_parents=st.integers(1, 3),
    num_siblings=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    replaced=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_all_numbers_are_those_of_the_definition(
    vocab: int, num_parents: int, num_siblings: int, kind: str, replaced: bool, seed: int
) -> None:
    made = case(seed, vocab, num_parents, num_siblings, kind, replaced=replaced)
    exact, found, end = Exact(made), made.made(), made.proposals.end
    assert not found.is_nan.any()
    nodes = made.nodes
    assert_close(found.ratios(nodes), [exact.ratio(node) for node in nodes.tolist()])
    scale = torch.rand(len(nodes), generator=torch.Generator().manual_seed(seed))
    both = list(zip(nodes.tolist(), scale.double().tolist(), strict=True))
    assert_close(found.missed(nodes, scale), [exact.rest(*each).sum() for each in both], scale.numpy())

    # Siblings are refused in order, each parent's next one together with those of the others; at times none is.
    for i in range(len(nodes) // num_parents):
        each = nodes.view(num_parents, -1)[:, i].clone()
        each[torch.from_numpy(np.random.default_rng(seed + i).random(num_parents) < 0.3)] = end
        scales = [1.0, 0.5 + 0.5 * float(scale[0])][i % 2]
        expected = [exact.refuse(node, scales) if node < end else 0.0 for node in each.tolist()]
        assert_close(found.refuse(each, torch.full((num_parents,), scales)), expected, scales)
        later = nodes.view(num_parents, -1)[:, i:].flatten()
        ratios = [exact.ratio(node) for node in later.tolist()]
        assert_close(found.ratios(later), ratios, np.array(ratios).max(initial=1))
    weights = found.weights(torch.arange(end)).double().numpy()
    weights /= weights.sum(axis=1, keepdims=True)
    assert np.abs(weights - exact.left).max() < 2e-5
    assert ((weights > 1e-9) <= (exact.left > 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_as_exact_as_probabilities(kind: str) -> None:
    """Also where a residual is small: the draft's distribution is nearly the target's."""
    made = case(1, 2 * PART + 101, 1, 1, kind, chosen=0)
    exact = Exact(made)
    close = torch.from_numpy(exact.left[0].astype(np.float32))
    tokens = made.proposals.q_ids[0] if kind == "q_ids" else made.proposals.q_to_target
    q = (close if tokens is None else close[tokens]).unsqueeze(0) * 7
    made = evolve(made, proposals=evolve(made.proposals, q=q))
    exact, found = Exact(made), made.made()
    for scale in (1.0, 0.999, 0.5):
        missed = float(found.missed(made.nodes, torch.tensor([scale])))
        assert abs(missed - exact.rest(int(made.nodes), scale).sum()) < 1e-7


def test_equal_distributions_leave_the_target_as_it_is() -> None:
    """Nothing is left of it, which has probability 0: rounding may come to it."""
    vocab = PART + 10
    logits = torch.zeros(2, vocab)
    q_rows = torch.tensor([-1, 0, -1])
    ids = torch.tensor([0, 5, 0])
    proposals = Proposals(
        2,
        vocab,
        ids,
        torch.tensor([2, 0, 2]),
        q_rows,
        torch.zeros(3, 0, dtype=torch.int64),
        torch.ones(1, vocab),
        None,
        None,
    )
    found = OPS["residuals"](logits, proposals)
    for _ in range(2):
        assert found.refuse(torch.tensor([1]), torch.ones(1)).tolist() == [0]
        assert torch.allclose(found.weights(torch.tensor([0])), torch.full((1, vocab), 1 / vocab))


def test_a_draft_token_that_is_certain() -> None:
    made = case(3, 60, 2, 2, "dense", chosen=1)
    exact, found = Exact(made), made.made()
    without_q = OPS["residuals"](made.logits, evolve(made.proposals, q=None))
    scale = torch.full((len(made.nodes),), 0.75)
    expected = [exact.rest(node, 0.75).sum() for node in made.nodes.tolist()]
    for each in (found, without_q):
        assert_close(each.missed(made.nodes, scale), expected, 0.75)
        assert_close(each.ratios(made.nodes), [exact.ratio(node) for node in made.nodes.tolist()])


@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_tokens(kind: str) -> None:
    made = case(0, 40, 2, 1, kind)
    found, end = made.made(), made.proposals.end
    nothing = torch.empty(0, dtype=torch.int64)
    assert len(found.ratios(nothing)) == len(found.missed(nothing, torch.empty(0))) == len(found.weights(nothing)) == 0
    assert len(found.refuse(nothing, torch.empty(0))) == 0
    ends = torch.tensor([end, end])
    assert found.missed(ends, torch.ones(2)).tolist() == found.refuse(ends, torch.ones(2)).tolist() == [0, 0]
    assert len(found.ratios(ends)) == len(found.weights(ends)) == 2
    assert_close(found.weights(torch.arange(end)), Exact(made).left, 1.0)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, PART + 3])
def test_rows_that_are_not_finite_are_nan(odd: float, column: int) -> None:
    made = case(5, PART + 9, 3, 1, "dense", chosen=0)
    expected = [made.made().missed(made.nodes, torch.ones(3)), made.made().weights(torch.arange(3))]
    logits = made.logits.clone()
    logits[1, slice(None) if odd == -torch.inf else column] = odd
    found = evolve(made, logits=logits).made()
    assert found.is_nan.tolist() == [False, True, False, False, False, False]
    missed, weights = found.missed(made.nodes, torch.ones(3)), found.weights(torch.arange(3))
    assert missed.isnan().tolist() == found.ratios(made.nodes).isnan().tolist() == [False, True, False]
    assert bool(weights[1].isnan().all())
    assert bool(found.refuse(made.nodes, torch.ones(3))[1].isnan())
    assert bool(found.weights(torch.tensor([1])).isnan().all())
    for each, before in zip((missed, weights), expected, strict=True):
        assert torch.equal(each[[0, 2]], before[[0, 2]])


def first(made: Case, n: int) -> Case:
    """The first n parents, each with its one draft token, alone."""
    given, num_parents = made.proposals, made.proposals.end // 2
    rows = torch.cat([torch.arange(n), torch.arange(num_parents, num_parents + n), torch.tensor([given.end])])
    few = {name: getattr(given, name)[rows] for name in ("token_ids", "q_rows", "earlier")}
    parent_rows = given.parent_rows[rows].clamp(max=2 * n)
    return Case(made.logits[rows[:-1]], evolve(given, end=2 * n, parent_rows=parent_rows, **few))


@pytest.mark.parametrize("kind", ["dense", "q_to_target"])
def test_rows_do_not_depend_on_each_other(kind: str) -> None:
    """A row's numbers are the same bits whether it is verified alone, with 6 or with 63 others."""
    made = case(7, PART + 77, 64, 1, kind, chosen=0.1)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(0))
    numbers = {}
    for n in (64, 7, 1):
        few = first(made, n)
        found = few.made()
        before = found.ratios(few.nodes)
        missed = found.refuse(few.nodes, scale[:n])
        numbers[n] = before, missed, found.ratios(few.nodes), found.weights(torch.arange(n))
    for n in (7, 1):
        for one, of_all in zip(numbers[n], numbers[64], strict=True):
            assert torch.equal(one, of_all[:n])


def test_logits_may_have_other_rows_between_them() -> None:
    made = case(9, 50, 2, 2, "dense")
    apart = torch.zeros(made.logits.shape[0], 100)
    apart[:, ::2] = made.logits
    scale = torch.ones(len(made.nodes))
    expected = made.made().missed(made.nodes, scale)
    for logits in (apart[:, ::2], torch.cat([made.logits, made.logits], dim=1)[:, :50]):
        assert torch.equal(evolve(made, logits=logits).made().missed(made.nodes, scale), expected)


def test_other_types_are_left_to_the_reference() -> None:
    made = case(2, 30, 2, 2, "dense")
    found = evolve(made, logits=made.logits.double()).made()
    assert found.missed(made.nodes, torch.ones(len(made.nodes), dtype=torch.float64)).dtype == torch.float64
