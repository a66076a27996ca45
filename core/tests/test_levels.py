"""Draft trees are the same whether or not each level is padded with dead entries to a fixed size."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from level_stops import StopsAt
from test_drafting import batch_of
from test_trees import CPU, SHAPES, VOCAB, Path, grown, levels, logits_after, tokens_of

from specdec_core.budget.budget import Budget
from specdec_core.budget.choice import Expected
from specdec_core.budget.cost_curve import CostCurve
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.drafting import DynamicTree, Level, StaticTree, TreeGrower, dynamic_grower_of, grower_of
from specdec_core.drafting.chain import HostChain
from specdec_core.drafting.device_dynamic import DeviceDynamicTree
from specdec_core.drafting.device_tree import DeviceTree
from specdec_core.engine.draft_check import check_draft
from specdec_core.ops import REFERENCE

Patch = pytest.MonkeyPatch


@attrs.frozen
class Case:
    kind: str  # "dynamic", or a shape
    method: str
    budgets_and_depths: list[tuple[int, int]]
    odd: frozenset[int]  # paths after which there are no numbers, or a single token

    def model(self, request: int, path: Path) -> torch.Tensor:
        logits = logits_after(request, path)
        number = hash((request, path, 1)) % 31
        if number not in self.odd:
            return logits
        if number % 2:
            return torch.full_like(logits, torch.nan)
        return logits.masked_fill(torch.arange(VOCAB) != number % VOCAB, -torch.inf)

    @property
    def budgets(self) -> list[int]:
        return [budget for budget, _ in self.budgets_and_depths]

    def has_equal_trees(self, request: int) -> bool:
        """Whether a request's tree is the same on a GPU. Where logits are not finite, a tree on a CPU has other nodes
        in the place of those that are missing, and later draws have other keys."""
        if not self.odd or self.kind == "dynamic":
            return True
        shape = TokenTree.parse(self.kind)
        return shape.is_chain or (self.method == "greedy" and self.budgets[request] >= len(shape.paths))

    def draft(self, *, of_fixed_size: bool) -> Draft:
        batch = batch_of(self.budgets, [0.7 * (b % 3) for b in range(len(self.budgets))])
        with levels(of_fixed_size=of_fixed_size):
            if self.kind == "dynamic":
                tree: TreeGrower = dynamic_grower_of(batch, 3, 3)
            else:
                tree = grower_of(batch, TokenTree.parse(self.kind), self.method)
        return grown(tree, len(self.budgets), self.model)


cases = st.builds(
    Case,
    kind=st.sampled_from(["dynamic", *SHAPES]),
    method=st.sampled_from(["greedy", "probabilistic"]),
    budgets_and_depths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4),
    odd=st.frozensets(st.integers(0, 30), max_size=12),
)


@pytest.mark.parametrize("of_fixed_size", [False, True])
def test_trees_take_the_operation_of_their_batch(of_fixed_size: bool) -> None:
    asked: list[int] = []

    def most_likely(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(number)
        return REFERENCE["most_likely"](logits, number)

    batch = attrs.evolve(batch_of([9, 9], [0.0, 0.0]), most_likely=most_likely)
    with levels(of_fixed_size=of_fixed_size):
        grown(dynamic_grower_of(batch, 3, 1), 2)
        grown(grower_of(batch, TokenTree.parse("[(0,), (1,), (0, 0)]")), 2)
    assert asked == [3, 3, *([2, 1] if of_fixed_size else [])]  # on a CPU, trees of a fixed shape need probabilities


def check(case: Case) -> None:
    shrunk, fixed = case.draft(of_fixed_size=False), case.draft(of_fixed_size=True)
    for draft in (shrunk, fixed):
        check_draft(draft, case.budgets, VOCAB, CPU)
    are_equal = [case.has_equal_trees(b) for b in range(len(case.budgets))]
    for b, is_equal in enumerate(are_equal):
        found, expected = tokens_of(fixed, b), tokens_of(shrunk, b)
        if is_equal:
            assert found == expected
        elif case.method == "greedy":
            assert {*found} <= {*expected}
    if all(are_equal) and fixed.scores is not None and shrunk.scores is not None:
        torch.testing.assert_close(fixed.scores[fixed.parents != DEAD], shrunk.scores)


@settings(max_examples=150, deadline=None)
@given(case=cases)
def test_they_grow_the_same_trees(case: Case) -> None:
    check(case)


@settings(max_examples=100, deadline=None)
@given(
    case=cases,
    length=st.integers(1, 5),
    method=st.sampled_from(["greedy", "probabilistic", "auto"]),
    table=st.sampled_from([None, "shared", "of each request"]),
    of_fixed_size=st.booleans(),
)
def test_a_chain_is_a_static_tree(case: Case, length: int, method: str, table: str | None, of_fixed_size: bool) -> None:
    size = len(case.budgets)
    orders = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(b)) for b in range(size)]
    ids = None if table is None else orders[0] if table == "shared" else torch.stack(orders)
    batch = attrs.evolve(
        batch_of(case.budgets, [0.7 * (b % 3) for b in range(size)]), may_sample=tuple(b % 3 == 1 for b in range(size))
    )
    stops = [StopsAt([depth for _, depth in case.budgets_and_depths]) for _ in range(2)]
    drafts = []
    for stop, is_tree in zip(stops, (False, True), strict=True):
        stopped = batch if of_fixed_size else attrs.evolve(batch, levels=stop)
        with levels(of_fixed_size=of_fixed_size):
            if is_tree:
                grower: TreeGrower = StaticTree(stopped, TokenTree.chain(length), method, ids)
            else:
                grower = grower_of(stopped, TokenTree.chain(length), method, ids)
        drafts.append(grown(grower, size, case.model))
    chain, tree = drafts
    check_draft(chain, case.budgets, VOCAB, CPU)
    assert chain.is_chain
    assert [tokens_of(chain, b) for b in range(size)] == [tokens_of(tree, b) for b in range(size)]
    is_alive = chain.parents != DEAD
    if not is_alive.any():
        return
    torch.testing.assert_close(chain.scores[is_alive], tree.scores)
    if tree.q_rows is None:
        assert chain.q_rows is None or (chain.q_rows < 0).all()
        return
    rows, expected = chain.q_rows[is_alive].long(), tree.q_rows.long()
    is_sampled = expected >= 0
    assert torch.equal(rows >= 0, is_sampled)
    torch.testing.assert_close(chain.q[rows[is_sampled]], tree.q[expected[is_sampled]])
    if tree.q_ids is not None:
        assert torch.equal(chain.q_ids[rows[is_sampled]], tree.q_ids[expected[is_sampled]])


@pytest.mark.parametrize("kind", ["dynamic", "chain", "tree"])
def test_drafts_that_cost_nothing_grow_to_their_limit(kind: str) -> None:
    """A dynamic tree grows more tokens in each level than it keeps: they do not count against its limit."""
    budget = Budget(CostCurve({1: 1.0, 2: 1.0}, 64), 2, 7, in_place=False)
    requests: Any = [SimpleNamespace(id=name, token_ids=np.zeros(5, dtype=np.int64)) for name in "ab"]
    for request in requests:
        budget.start(request, is_sampled=False)
    budget._asks_levels = True
    assert budget.share(requests, [7, 7], Expected.of_plain(2)) == [7, 7]
    batch = attrs.evolve(batch_of([7, 7], [0.0, 0.0]), levels=budget.levels([7, 7], CPU))
    grower = {
        "dynamic": lambda: dynamic_grower_of(batch, 3, 9),
        "chain": lambda: grower_of(batch, TokenTree.chain(7)),
        "tree": lambda: grower_of(
            batch, TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]")
        ),
    }[kind]()

    def certain(request: int, path: Path) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot(torch.tensor(len(path)), VOCAB)

    draft = grown(grower, 2, certain)
    assert draft.max_depth == (4 if kind == "tree" else 7)
    assert draft.num_nodes_per_request == [7, 7]


@pytest.mark.parametrize("kind", ["dynamic", *SHAPES])
def test_a_level_has_as_many_entries_as_it_could_need(kind: str) -> None:
    widths: dict[bool, list[tuple[int, int]]] = {}
    for of_fixed_size in (False, True):
        seen = widths[of_fixed_size] = []
        with levels(of_fixed_size=of_fixed_size):
            batch = batch_of([9, 1, 2], [0.0] * 3)
            tree: Any = dynamic_grower_of(batch, 3, 3) if kind == "dynamic" else grower_of(batch, TokenTree.parse(kind))
        grow_one = tree.grow

        def noted(logits: torch.Tensor, grow_one: Any = grow_one, seen: Any = seen) -> Level | None:
            level = grow_one(logits)
            if level is not None:
                seen.append((len(level.requests), level.width))
            return level

        tree.grow = noted
        grown(tree, 3)
    shape = None if kind == "dynamic" else TokenTree.parse(kind)
    most = [3] * 3 if shape is None else [*shape.widths[: shape.depth - 1]]
    assert widths[True] == [(3, width) for width in most]
    assert all(n <= 3 and width <= most[i] for i, (n, width) in enumerate(widths[False]))


def dead_entries_grow(patch: Patch) -> None:
    laid = StaticTree._with_dead

    def growing(self: Any, *args: Any) -> Any:
        entries = laid(self, *args)
        return entries._replace(kinds=torch.where(entries.kinds == self._leaf, 0, entries.kinds))

    patch.setattr(StaticTree, "_with_dead", growing)


def dead_tokens_grow(patch: Patch) -> None:
    grow = DeviceTree.grow

    def growing(self: Any, logits: torch.Tensor) -> Level | None:
        level = grow(self, logits)
        self._goes_on = torch.ones_like(self._goes_on)
        return level

    patch.setattr(DeviceTree, "grow", growing)


def dead_candidates_grow(patch: Patch) -> None:
    frontier = DeviceDynamicTree._level

    def growing(self: Any, *args: Any) -> Level:
        level = frontier(self, *args)
        self._frontier_scores = self._frontier_scores.clamp(min=-50)
        return level

    patch.setattr(DeviceDynamicTree, "_level", growing)


def children_have_the_parent_before(patch: Patch) -> None:
    children = DeviceTree._children

    def shifted(self: Any, logits: torch.Tensor, at: Any) -> Any:
        return children(self, logits, attrs.evolve(at, chosen=at.chosen.roll(1)))

    patch.setattr(DeviceTree, "_children", shifted)


def rows_are_those_of_another_request(patch: Patch) -> None:
    for grower in (HostChain, StaticTree, DynamicTree):
        patch.setattr(grower, "_level", _rolled(grower._level))


def _rolled(level_of: Any) -> Any:
    def rolled(self: Any, *args: Any) -> Level:
        level: Level = level_of(self, *args)
        return attrs.evolve(level, rows=level.rows.roll(level.width))

    return rolled


def dead_entries_come_of_the_first_request(patch: Patch) -> None:
    laid = StaticTree._with_dead

    def of_the_first(self: Any, nodes: Any, places: Any, *args: Any) -> Any:
        entries = laid(self, nodes, places, *args)
        is_dead = torch.ones(len(entries.rows), dtype=torch.bool).index_fill_(0, torch.from_numpy(places), False)
        return entries._replace(rows=entries.rows.masked_fill(is_dead, 0))

    patch.setattr(StaticTree, "_with_dead", of_the_first)


def dead_entries_see_ancestors(patch: Patch) -> None:
    laid = StaticTree._with_dead
    patch.setattr(
        StaticTree, "_with_dead", lambda self, *args: (e := laid(self, *args))._replace(ancestors=0 * e.ancestors)
    )


def is_noticed() -> bool:
    odd = [range(9), *(range(first, 31, 4) for first in range(4))]
    for kind, paths in product(("dynamic", *SHAPES[1:]), odd):
        try:
            check(Case(kind, "greedy", [(9, 4), (2, 4), (9, 2), (9, 4)], frozenset(paths)))
        except (AssertionError, ValueError, LookupError):
            return True
    return False


@pytest.mark.parametrize(
    "fault",
    [
        dead_entries_grow,
        dead_tokens_grow,
        children_have_the_parent_before,
        dead_candidates_grow,
        rows_are_those_of_another_request,
        dead_entries_come_of_the_first_request,
        dead_entries_see_ancestors,
    ],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(fault: Any, monkeypatch: Patch) -> None:
    assert not is_noticed()
    fault(monkeypatch)
    assert is_noticed()
