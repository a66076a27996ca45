"""DraftBuilder: the number and the order of the nodes in its drafts, and the draft probabilities `q` of sampled
tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings, strategies as st

from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.contracts.verifier import RandomSource
from specdec_core.drafting import DraftBuilder, builder, device_tree
from specdec_core.drafting.device_tree import DeviceTree, _places_of
from specdec_core.drafting.distributions import Distributions, draw_children
from specdec_core.engine.draft_check import check_draft
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.drawn_trees import Emitted, Model, Shape, emit, histories, random_model


def batch_of(budgets: list[int], temperature: list[float], random: RandomSource | None = None) -> ProposerBatch:
    num_requests = len(budgets)
    positions = torch.full((num_requests,), 10)
    return ProposerBatch(
        requests=[],
        root_token_ids=torch.zeros(num_requests, dtype=torch.int64),
        root_positions=positions,
        temperature=torch.tensor(temperature),
        max_draft_tokens=tuple(budgets),
        random=random or CounterRandom(range(num_requests), positions),
    )


def grow_levels(builder: DraftBuilder, num_requests: int, widths: list[int], vocab: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    requests, parents, grown = torch.arange(num_requests), torch.full((num_requests,), -1), []
    for width in widths:
        logits = 3 * torch.randn(len(requests), vocab, generator=generator)
        level = builder.grow(logits, requests, parents, width)
        grown.append((logits, requests, parents, level))
        requests, parents = requests[level.parents], level.nodes
    return grown


@settings(max_examples=80, deadline=None)
@given(
    budgets=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    widths=st.lists(st.integers(1, 3), max_size=4),
    vocab=st.integers(2, 12),
    method=st.sampled_from(["greedy", "probabilistic"]),
    is_mapped=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_drafts_are_what_the_contract_says(
    budgets: list[int], widths: list[int], vocab: int, method: str, is_mapped: bool, seed: int
) -> None:
    temperature = [0.0 if (seed + i) % 3 == 0 else 0.5 + i for i in range(len(budgets))]
    mapping = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:vocab] if is_mapped else None
    builder = DraftBuilder(batch_of(budgets, temperature), method, mapping)
    grown = grow_levels(builder, len(budgets), widths, vocab, seed)
    draft = builder.build()
    check_draft(draft, budgets, 40 if is_mapped else vocab, torch.device("cpu"))
    assert draft.num_nodes == sum(len(level.nodes) for *_, level in grown)
    for logits, requests, parents, level in grown:
        for row, node, token in zip(*(each.tolist() for each in level[:3]), strict=True):
            request = int(requests[row])
            i = draft.offsets[request] + node
            assert int(draft.token_ids[i]) == token
            assert int(draft.parents[i]) == int(parents[row])
            is_sampled = method == "probabilistic" and temperature[request] > 0
            probs = (logits[row] / (temperature[request] if is_sampled else 1)).softmax(-1)
            column = token if mapping is None else mapping.tolist().index(token)
            assert float(draft.scores[i]) == pytest.approx(float(probs[column]))
            if draft.q_rows is None or draft.q_rows[i] < 0:
                assert not is_sampled
            else:
                torch.testing.assert_close(draft.q[draft.q_rows[i]], probs)
        siblings = list(
            zip(requests[level.parents].tolist(), level.parents.tolist(), level.token_ids.tolist(), strict=True)
        )
        assert len(set(siblings)) == len(siblings), "two siblings are alike"


def test_greedy_siblings_are_the_most_probable() -> None:
    builder = DraftBuilder(batch_of([5, 2], [1.0, 1.0]))
    logits = torch.tensor([[0.0, 3, 1, 2], [5, 0, 1, 2]])
    grown = builder.grow(logits, torch.tensor([0, 1]), torch.tensor([-1, -1]), 3)
    assert grown.token_ids.tolist() == [1, 3, 2, 0, 3]  # the second has room for two
    assert grown.parents.tolist() == [0, 0, 0, 1, 1]
    assert builder.build().q is None


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_logits_that_are_not_finite_end_their_draft_alone(method: str) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    drafts = []
    for poison in (0.0, torch.nan):
        logits[1, 2] = poison
        builder = DraftBuilder(batch_of([2, 2, 2], [1.0, 1.0, 0.0]), method)
        builder.grow(logits, torch.arange(3), torch.full((3,), -1), 2)
        drafts.append(builder.build())
        check_draft(drafts[-1], [2, 2, 2], 6, torch.device("cpu"))
    sound, poisoned = drafts
    assert poisoned.offsets == (0, 2, 2, 4)
    assert [poisoned.tree(b) for b in (0, 2)] == [sound.tree(b) for b in (0, 2)]
    nothing = DraftBuilder(batch_of([2], [1.0]), method)
    assert len(nothing.grow(torch.full((1, 6), torch.nan), torch.tensor([0]), torch.tensor([-1])).nodes) == 0
    assert nothing.build().num_nodes == 0


def test_requests_may_grow_one_after_the_other() -> None:
    builder = DraftBuilder(batch_of([1, 1], [1.0, 1.0]))
    for request in range(2):
        builder.grow(torch.tensor([[0.0, 1]]), torch.tensor([request]), torch.tensor([-1]))
    check_draft(builder.build(), [1, 1], 2, torch.device("cpu"))


def test_chains_are_marked() -> None:
    for widths, is_chain in (([1, 1, 1], True), ([2, 1], False)):
        builder = DraftBuilder(batch_of([4, 2], [1.0, 0.0]), "probabilistic")
        grow_levels(builder, 2, widths, 5, 0)
        assert builder.build().is_chain == is_chain


def grown_draft(shape: Shape, q: Model, random: RandomSource) -> Draft:
    """Return a draft that DraftBuilder samples from the draft model `q`: two children of the root, and two of the first
    child."""
    builder = DraftBuilder(batch_of([4], [1.0], random), "probabilistic")
    request = torch.zeros(1, dtype=torch.int64)
    first = builder.grow(torch.tensor(np.log(q[()]))[None], request, torch.tensor([-1]), 2)
    history = histories(first.token_ids.tolist(), (-1, -1))[0]
    builder.grow(torch.tensor(np.log(q[history]))[None], request, first.nodes[:1], 2)
    return builder.build()


def device_draft(shape: Shape, q: Model, random: RandomSource) -> Draft:
    """Return such a draft as it grows on a GPU."""
    batch = batch_of([4], [1.0], random)
    tokens = TokenTree.parse([(0,), (1,), (0, 0), (0, 1)])
    tree = DeviceTree(batch, tokens, Distributions(batch, "probabilistic", None), 0.0)
    level = tree.grow(torch.tensor(np.log(q[()]))[None])
    assert level is not None
    above = histories(level.token_ids.tolist(), (-1, -1))
    assert tree.grow(torch.tensor(np.log([q[history] for history in above]))) is None
    return tree.build()


@pytest.mark.parametrize("draw", [grown_draft, device_draft])
@pytest.mark.parametrize("rule", [RejectionVerifier, TraversalVerifier])
def test_what_it_draws_is_verified_losslessly(rule: Any, draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def emitted(seed: int) -> Emitted:
        q = random_model(3, 3, seed + 1, impossible=0)
        return emit(rule(), random_model(3, 3, seed), q, Shape((-1, -1, 0, 0), (None,) * 4), draw=draw)

    # The builder computes in float32, proofs in float64.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    assert max(emitted(seed).error for seed in range(2)) < 1e-12
    for module in (builder, device_tree):
        monkeypatch.setattr(module, "draw_children", first_key_again(draw_children))
    assert max(emitted(seed).error for seed in range(2)) > 1e-3


def first_key_again(draw: Any) -> Any:
    """Return the sampling function `draw` with a deliberate bug: all draws have the same key, so they share their
    noise."""
    return lambda random, left, requests, keys, number: draw(random, left, requests, 0 * keys, number)


def test_every_draw_on_a_gpu_has_a_key_of_its_own() -> None:
    """In a tree whose nodes have different numbers of children, draws of which nothing is used may share keys, but no
    others."""
    for paths in ([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 0), (2, 0, 1)], [(0,), (0, 0), (0, 1)]):
        keys = []
        for at in _places_of(TokenTree.parse(paths), torch.device("cpu")):
            ranks = at.chosen % at.most
            keys += (at.keys[at.chosen // at.most] + ranks).tolist()
        assert sorted(keys) == list(range(len(paths)))


@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(st.sampled_from("dcg"), min_size=1, max_size=4), seed=st.integers(0, 2**20))
def test_auto_draws_for_requests_that_may_be_sampled(kinds: list[str], seed: int) -> None:
    """Of requests that may be sampled (d), must not be (c), and are greedy (g)."""
    batch = evolve(
        batch_of([5] * len(kinds), [0.0 if kind == "g" else 0.8 for kind in kinds]),
        may_sample=tuple(kind == "d" for kind in kinds),
    )

    def draft_of(batch: ProposerBatch, method: str) -> Draft:
        builder = DraftBuilder(batch, method)
        grow_levels(builder, len(kinds), [1, 2], vocab=9, seed=seed)
        return builder.build()

    found = draft_of(batch, "auto")
    drawn, chosen = (draft_of(evolve(batch, may_sample=()), method) for method in ("probabilistic", "auto"))
    assert chosen.q is None
    for i, kind in enumerate(kinds):
        # Later levels have other logits for each request if the tree of another one has other sizes.
        same = (drawn if kind == "d" else chosen).tree(i)
        assert found.tree(i).token_ids[:1] == same.token_ids[:1]
        rows = None if found.q_rows is None else found.q_rows[found.offsets[i] : found.offsets[i + 1]]
        assert (rows is not None and bool((rows >= 0).all())) == (kind == "d")
