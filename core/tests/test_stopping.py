"""Adaptive draft length: lossless output, the draft trees after a stop, learned acceptance rates, and measured
costs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from drawn_trees import Model, Shape, emit, random_model
from hypothesis import given, settings, strategies as st
from naive_verifier import draft_of
from test_drafting import batch_of
from test_trees import CPU, SHAPES, VOCAB, dynamic_reference, grown, levels, tokens_of

from specdec_core.config.draft_options import DraftStopConfig
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import StepCosts
from specdec_core.contracts.report import StepReport
from specdec_core.contracts.verifier import RandomSource
from specdec_core.drafting import DraftStop, DynamicTree, StaticTree, Stopping, TreeGrower, grow
from specdec_core.drafting.acceptance import Nodes
from specdec_core.drafting.stop import NUM_SKIPPED as NUM_LEVELS_SKIPPED, NUM_TIMED
from specdec_core.engine.costs import NUM_SKIPPED, NUM_STEPS, CostMeter
from specdec_core.engine.draft_check import check_draft
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier

CHAIN = TokenTree.chain(3)
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (1, 0)]")


def stop_at(level: float, node: float, num_requests: int = 1) -> DraftStop:
    config = DraftStopConfig(adaptive_draft_length=True, draft_level_cost=level, draft_node_cost=node)
    return DraftStop(config, num_requests)


def request_of(name: str = "any", num_tokens: int = 5) -> Any:
    return SimpleNamespace(id=name, token_ids=np.zeros(num_tokens, dtype=np.int64))


# What is emitted


def stopped_draft(tree: TokenTree, level: float, node: float) -> Callable[[Shape, Model, RandomSource], Draft]:
    """Return a function that samples a draft with adaptive length. Its attribute `drawn` lists all its drafts.

    tree: the shape of a draft that does not stop early. level: draft_level_cost. node: draft_node_cost.

    In the acceptance statistics, earlier draft tokens with a probability above 0.5 were accepted.
    """

    def draw(shape: Shape, q: Model, random: RandomSource) -> Draft:
        stop, request = stop_at(level, node), request_of()
        stop.start(request)
        probs = np.array([0.05, 0.15, 0.3, 0.4, 0.6, 0.7, 0.85, 0.95]).repeat(20)
        rows, first = np.zeros(len(probs), dtype=np.int64), np.ones(len(probs), dtype=bool)
        stop._acceptance.add_nodes(rows, 1, probs, first, probs > 0.5)
        batch = attrs.evolve(batch_of([len(tree.paths)], [1.0], random), requests=[request])
        grower = StaticTree(batch, tree, "probabilistic", None, stop.begin(batch))
        paths: list[tuple[int, ...]] = [()]

        def logits() -> torch.Tensor:
            return torch.tensor(np.log(np.maximum([q[path] for path in paths], 1e-300)))

        def forward(level: Any) -> torch.Tensor:
            paths[:] = [(*paths[row], token) for row, token in zip(level.rows, level.token_ids.tolist(), strict=True)]
            return logits()

        drawn.append(grow(grower, logits(), forward))
        return drawn[-1]

    drawn: list[Draft] = []
    draw.drawn = drawn  # type: ignore[attr-defined]
    return draw


def errors(rule: Any, tree: TokenTree, level: float, node: float) -> tuple[float, set[tuple[int, int]]]:
    """Return the error of the output distribution, and (depth, number of nodes) of every draft that was sampled."""
    shape = Shape(tuple(range(-1, tree.depth - 1)), (None,) * tree.depth)
    draw = stopped_draft(tree, level, node)
    error = emit(rule(), random_model(3, 4, 1), random_model(3, 4, 10, 0), shape, draw).error
    return error, {(draft.max_depth, draft.num_nodes) for draft in draw.drawn}  # type: ignore[attr-defined]


CASES = [
    (RejectionVerifier, CHAIN),
    (BlockVerifier, CHAIN),
    (TraversalVerifier, CHAIN),
    (RejectionVerifier, TREE),
    (TraversalVerifier, TREE),
]


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_sampled_drafts_that_stop_by_their_tokens_are_lossless(rule, tree, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    error, sizes = errors(rule, tree, 0.3, 0.02)
    assert len({depth for depth, _ in sizes}) >= 2, "all drafts are alike: this shows nothing"
    assert error < 1e-12


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_a_stop_by_a_nodes_own_token_is_noticed(rule, tree, monkeypatch):
    """A deliberate bug biases the output: sampled draft tokens are dropped because they are unlikely."""
    of = Nodes.of

    def all_chosen(draft: Draft) -> Nodes:
        nodes = of(draft)
        return attrs.evolve(nodes, is_sampled_request=np.zeros_like(nodes.is_sampled_request))

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(Nodes, "of", all_chosen)
    error, _ = errors(rule, tree, 0.01, 0.3)
    assert error > 1e-3


# What is left of trees


class StopsAt(Stopping):
    """A stop rule that ends each request's draft at a given depth (0: the request drafts nothing). It drops no
    nodes."""

    def __init__(self, depths: list[int]) -> None:
        self._depths = np.array(depths)
        self._depth = 0

    @property
    def drafting(self) -> list[int]:
        return np.flatnonzero(self._depths > 0).tolist()

    def goes_on(self, requests: np.ndarray, *more: np.ndarray) -> np.ndarray:
        assert np.unique(requests).tolist() == np.flatnonzero(self._depths > self._depth).tolist()
        self._depth += 1
        return self._depths > self._depth

    def keep(self, draft: Draft, *, in_place: bool) -> Draft:
        return draft


@given(
    shape=st.sampled_from(SHAPES),
    budgets_and_depths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=4),
    of_fixed_size=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_static_tree_that_is_stopped_is_its_upper_part(shape, budgets_and_depths, of_fixed_size):
    budgets, depths = map(list, zip(*budgets_and_depths, strict=True))
    tree = TokenTree.parse(shape)

    def draft_of(stopping: Stopping | None) -> Draft:
        with levels(of_fixed_size=of_fixed_size):
            grower = StaticTree(batch_of(budgets, [0.0] * len(budgets)), tree, stopping=stopping)
        return grown(grower, len(budgets))

    class Checks(StopsAt):
        def goes_on(self, requests, *more):  # type: ignore[no-untyped-def]
            self._depth += 1
            return (self._depths > self._depth) & (more[-1] > 0)

    whole, stopped = draft_of(None), draft_of(Checks(depths))
    check_draft(stopped, budgets, VOCAB, CPU)
    for b, depth in enumerate(depths):
        assert tokens_of(stopped, b) == [path for path in tokens_of(whole, b) if len(path) <= depth]


@given(
    top_k=st.integers(1, 4),
    budgets_and_depths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=4),
    of_fixed_size=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_dynamic_tree_that_is_stopped_is_a_shallower_one(top_k, budgets_and_depths, of_fixed_size):
    budgets, depths = map(list, zip(*budgets_and_depths, strict=True))
    with levels(of_fixed_size=of_fixed_size):
        grower = DynamicTree(batch_of(budgets, [0.0] * len(budgets)), top_k, 3, stopping=StopsAt(depths))
    draft = grown(grower, len(budgets))
    check_draft(draft, budgets, VOCAB, CPU)
    for b, (budget, depth) in enumerate(zip(budgets, depths, strict=True)):
        deepest = min(depth, max(budgets), 4)
        assert tokens_of(draft, b) == (dynamic_reference(b, top_k, deepest - 1, budget)[0] if depth else [])


@pytest.mark.parametrize("in_place", [True, False])
def test_chosen_nodes_that_are_not_worth_a_row_go(in_place):
    draft = attrs.evolve(
        draft_of([([5, 6, 7, 8], [-1, -1, 0, 2]), ([5, 6], [-1, 0]), ([9], [-1])]),
        scores=torch.tensor([0.9, 0.001, 0.9, 0.001, 0.9, 0.9, 0.001]),
    )
    stop, requests = stop_at(0.1, 0.05, 3), [request_of(name) for name in "abc"]
    for request in requests:
        stop.start(request)
    stopping = stop.begin(attrs.evolve(batch_of([9, 9, 9], [0.0] * 3), requests=requests))
    kept = stopping.keep(draft, in_place=in_place)
    check_draft(kept, [9, 9, 9], 10, CPU)
    first = ([5, 6, 7], [-1, -1, 0]) if in_place else ([5, 7], [-1, 0])
    assert [kept.tree(b) for b in range(3)] == [first, ([5, 6], [-1, 0]), ([], [])]
    assert kept.max_depth == 2


@pytest.mark.parametrize("in_place", [True, False])
def test_dead_nodes_are_worth_nothing(in_place):
    draft = attrs.evolve(
        draft_of([([5, 6, 7, 8, 9], [-1, DEAD, 0, 1, DEAD]), ([5], [DEAD]), ([9, 9], [DEAD, 0])]),
        scores=torch.tensor([0.9] * 8),
    )
    stop, requests = stop_at(0.1, 0.05, 3), [request_of(name) for name in "abc"]
    for request in requests:
        stop.start(request)
    stopping = stop.begin(attrs.evolve(batch_of([9, 9, 9], [0.0] * 3), requests=requests))
    kept = stopping.keep(draft, in_place=in_place)
    check_draft(kept, [9, 9, 9], 10, CPU)
    first = ([5, 6, 7], [-1, DEAD, 0]) if in_place else ([5, 7], [-1, 0])
    assert [kept.tree(b) for b in range(3)] == [first, ([], []), ([], [])]
    assert kept.num_live_per_request == [2, 0, 0]
    assert kept.max_depth == 2


def test_dead_nodes_are_not_learned_from():
    """Acceptance statistics leave out dead (padding) nodes, even those whose token the request emits next."""
    draft = attrs.evolve(draft_of([([7, 7, 8], [DEAD, -1, 1])]), scores=torch.tensor([0.01, 0.9, 0.9]))
    nodes = Nodes.of(draft)
    assert [level.tolist() for level in nodes.levels] == [[1], [2]]
    sampled = attrs.evolve(draft, q=torch.ones(1, 9) / 9, q_rows=torch.tensor([0, 0, -1], dtype=torch.int32))
    assert Nodes.of(sampled).is_first_draw.tolist() == [False, True, False]


# What is learned


class Simulated:
    """A simulated request. claim: the draft model's probability of each draft token."""

    def __init__(self, stop: DraftStop, budget: int = 6, claim: float = 0.9, seed: int = 0) -> None:
        self.stop, self.budget, self.request = stop, budget, request_of()
        self.logits = torch.tensor([[claim, 1 - claim, 1e-9]]).log()
        self.random = np.random.default_rng(seed)
        stop.start(self.request)

    def step(self, right: float, costs: StepCosts | None = None) -> tuple[int, int]:
        """Simulate one step. Returns the numbers of drafted and accepted tokens.

        right: the probability that a draft token is accepted. costs: measured costs of the target's forward pass, if
        known.
        """
        batch = attrs.evolve(batch_of([self.budget], [0.0]), requests=[self.request], costs=costs)
        grower: TreeGrower = StaticTree(batch, TokenTree.chain(self.budget), stopping=self.stop.begin(batch))
        roots = self.logits.expand(len(grower.roots), -1)
        draft = grow(grower, roots, lambda level: self.logits.expand(len(level.token_ids), -1))
        num_accepted = 0
        while num_accepted < draft.num_nodes and self.random.random() < right:
            num_accepted += 1
        said = [*draft.token_ids[:num_accepted].tolist(), 2]
        self.request.token_ids = np.append(self.request.token_ids, said)
        return draft.num_nodes, num_accepted

    def steps(self, number: int, right: float) -> np.ndarray:
        return np.array([self.step(right) for _ in range(number)])


def test_a_draft_that_is_never_right_ends_and_is_tried_again():
    request = Simulated(stop_at(0.1, 0.02))
    assert request.steps(20, 0.0)[:, 0].sum() > 0
    hopeless = request.steps(200, 0.0)[:, 0]
    assert 0 < hopeless.sum() <= 30
    recovering = request.steps(120, 1.0)
    assert recovering[-20:, 0].min() >= 4


def test_a_draft_that_is_always_right_is_never_stopped():
    assert (Simulated(stop_at(0.3, 0.05)).steps(50, 1.0) == 6).all()


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
def test_drafts_are_about_as_long_as_pays(right):
    """Adaptive drafts yield at least 90% of the tokens per unit of cost that the best fixed draft length yields."""
    level, node = 0.15, 0.02
    counts = Simulated(stop_at(level, node), budget=10).steps(200, right)[50:]
    reached = (counts[:, 1] + 1).sum() / (1 + (level + node) * counts[:, 0]).sum()
    # The first level is free but for its node, as no root was forwarded for it.
    best = max(sum(right**i for i in range(length + 1)) / (1 + (level + node) * length) for length in range(11))
    assert reached > 0.9 * best


def test_requests_learn_by_themselves():
    stop = stop_at(0.1, 0.02, 2)
    lucky, unlucky = Simulated(stop), Simulated.__new__(Simulated)
    unlucky.__dict__.update(lucky.__dict__, request=request_of("other"))
    stop.start(unlucky.request)
    unlucky.steps(60, 0.0)
    assert (lucky.steps(10, 1.0) == 6).all()
    stop.finish(unlucky.request)
    unlucky.request = request_of("third")
    stop.start(unlucky.request)
    assert unlucky.step(1.0)[0] == 6, "what was learned of a finished request was left to another"


def test_nothing_is_learned_of_a_request_that_starts_over():
    request = Simulated(stop_at(0.1, 0.02))
    expected = request.step(1.0)
    text = request.request.token_ids[:5]
    for _ in range(50):
        request.request.token_ids = text
        assert request.step(1.0) == expected


def test_without_the_option_nothing_stops():
    stop = DraftStop(DraftStopConfig(), 1)
    stop.start(request_of())
    assert stop.begin(attrs.evolve(batch_of([1], [0.0]), requests=[request_of()])) is None


# What it costs


SLOW_S = 1000.0  # seconds of a forward pass, compared with which drafting is cheap on any machine


def test_measured_costs_decide():
    request = Simulated(DraftStop(DraftStopConfig(adaptive_draft_length=True), 1))
    lengths = [request.step(0.5)[0] for _ in range(2 * (NUM_LEVELS_SKIPPED + NUM_TIMED) + 1)]
    assert lengths[:4] == [6, 0, 6, 0], "some steps go without while costs are measured"
    assert request.step(0.5, StepCosts(SLOW_S, 0.0))[0] >= 5
    assert request.step(0.5, StepCosts(1e-9, 0.0))[0] == 1, "the first level is free, and no other"
    nobody = Simulated(DraftStop(DraftStopConfig(adaptive_draft_length=True), 1))
    assert (nobody.steps(100, 0.5)[-30:, 0] == 6).all()


def test_drafts_of_one_node_are_measured_too():
    request = Simulated(DraftStop(DraftStopConfig(adaptive_draft_length=True), 1), budget=1)
    lengths = [request.step(0.5)[0] for _ in range(2 * (NUM_LEVELS_SKIPPED + NUM_TIMED) + 1)]
    assert set(lengths) == {0, 1}
    assert request.step(0.5, StepCosts(1.0, 0.0))[0] == 1
    assert request.step(0.5, StepCosts(1e-9, 1.0))[0] == 0, "another row of the target's is as dear as a step"


@pytest.mark.parametrize(("level_s", "num_levels"), [(0.9, 4), (1.5, 4), (2.5, 0)])
def test_requests_share_the_cost_of_a_level(level_s, num_levels):
    """Three requests share the time of a draft level. They draft if a level takes less time than the target."""
    stop = DraftStop(DraftStopConfig(adaptive_draft_length=True), 3, forwards_roots=True)
    requests = [request_of(name) for name in "abc"]
    for request in requests:
        stop.start(request)
    stop._level_s[:], stop._num_timed = level_s, NUM_LEVELS_SKIPPED + NUM_TIMED
    costs = StepCosts(target_s=2.0, token_s=0.0)
    batch = attrs.evolve(batch_of([4] * 3, [0.0] * 3), requests=requests, costs=costs)
    certain = torch.tensor([[0.0, -99.0]])
    tree = StaticTree(batch, TokenTree.chain(4), stopping=stop.begin(batch))
    roots = certain.expand(len(tree.roots), -1)
    draft = grow(tree, roots, lambda level: certain.expand(len(level.token_ids), -1))
    assert draft.num_nodes_per_request == [num_levels] * 3


def step(target_s, num_tokens):
    return StepReport(num_decode_requests=1, num_nodes=num_tokens - 1, target_s=target_s)


def test_costs_are_fitted_through_outliers():
    meter, random = CostMeter(), np.random.default_rng(0)
    for i in range(NUM_SKIPPED + NUM_STEPS):
        assert meter.costs is None
        tokens = 2 if i % 2 else 9
        slow = 5.0 if i < NUM_SKIPPED or random.random() < 0.2 else 1.0
        meter.add(step(slow * (0.02 + 0.003 * tokens), tokens))
    assert meter.costs is not None
    assert attrs.astuple(meter.costs) == pytest.approx((0.02, 0.003), rel=0.05)
    fixed = meter.costs
    meter.add(step(9.0, 5))
    assert meter.costs is fixed


def test_steps_that_are_all_alike_have_no_costs():
    meter = CostMeter()
    for _ in range(100):
        meter.add(step(0.2, 9))
    assert meter.costs is None
