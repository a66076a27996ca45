"""Draft tree shapes that users write, and static and dynamic trees grown from a model's probabilities."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_drafting import batch_of

from specdec_core.config.draft_options import DraftTreeConfig
from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import LevelBudget
from specdec_core.drafting import Level, TreeGrower, dynamic, dynamic_grower_of, grow, grower_of, static
from specdec_core.engine.draft_check import check_draft
from specdec_core.errors import ConfigError

CPU = torch.device("cpu")
VOCAB = 12
Path = tuple[int, ...]
SHAPES = [
    "[(0,)]",
    "[(0,), (0, 0), (0, 0, 0)]",
    "[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0), (2, 0, 1)]",
]
BY_WORTH = TokenTree.by_worth([(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (2,), (1, 0)])


def logits_after(request: int, path: Path) -> torch.Tensor:
    """Return the draft model's logits after the draft tokens of a path. No two paths have the same logits."""
    generator = torch.Generator().manual_seed(hash((request, path)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


@contextmanager
def levels(*, of_fixed_size: bool) -> Iterator[None]:
    """A context manager in which trees grow as on a GPU, where levels have a fixed size, with dead entries, or as
    on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (static, dynamic):
            patch.setattr(module, "may_shrink", lambda device: not of_fixed_size)
        yield


def grown(grower: TreeGrower, num_requests: int, model: Callable[[int, Path], torch.Tensor] = logits_after) -> Draft:
    """Grow a draft tree. Asserts that the parents and ancestors of each level's entries are right.

    model: returns logits, given a request's index and the draft tokens on a path. For dead (padding) entries the logits
    are extreme or NaN instead, to detect nodes below a dead entry.
    """
    entries: list[tuple[int, Path]] = [(b, ()) for b in range(num_requests)]
    by_number: list[dict[int, int]] = [{} for _ in range(num_requests)]
    written: list[set[int]] = [set() for _ in range(num_requests)]

    def forward(level: Level) -> torch.Tensor:
        nonlocal entries
        size = len(level.requests) * level.width
        is_alive = [True] * size if level.is_alive is None else level.is_alive.tolist()
        assert (len(is_alive), level.rows.shape, level.token_ids.shape) == (size, (size,), (size,))
        assert level.requests.tolist() == sorted({*level.requests.tolist()})
        above, entries = entries, []
        logits = []
        for i, (row, token) in enumerate(zip(level.rows.tolist(), level.token_ids.tolist(), strict=True)):
            b, numbers = int(level.requests[i // level.width]), level.ancestors[i].tolist()
            own = int(level.starts[b]) + i % level.width
            assert above[row][0] == b, "its parent is another request's"
            assert {*range(int(level.starts[b]))} <= written[b], "there are slots before its own that nobody wrote"
            if is_alive[i]:
                path = (*above[row][1], token)
                by_number[b][own] = token
                assert tuple(by_number[b][number] for number in numbers) == path  # the node itself last
                logits.append(model(b, path))
            else:
                path = (-1,)  # no node
                assert 0 <= token < VOCAB
                logits.append(torch.full((VOCAB,), torch.nan) if own % 2 else 99.0 * (torch.arange(VOCAB) == 1))
                assert {*numbers} == {own} or level.is_chain
            assert numbers[-1] == own
            entries.append((b, path))
        for b in level.requests.tolist():
            written[b] |= {*range(int(level.starts[b]), int(level.starts[b]) + level.width)}
        return torch.stack(logits)

    roots = [model(b, ()) for b, _ in entries]
    return grow(grower, torch.stack(roots) if roots else torch.empty(0, VOCAB), forward)


def tokens_of(draft: Draft, request: int) -> list[Path]:
    """The paths to the draft tokens of one request, without dead ones."""
    paths: dict[int, Path] = {-1: ()}
    for number, (token, parent) in enumerate(zip(*draft.tree(request), strict=True)):
        if parent != DEAD:
            paths[number] = (*paths[parent], token)
    return [*paths.values()][1:]


@pytest.mark.parametrize("of_fixed_size", [False, True])
def test_a_dynamic_tree_maps_each_requests_tokens_by_its_own_table(of_fixed_size):
    budgets, min_prob = [9] * 6, 0.15
    tables = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(b)) for b in range(6)])
    own = tables.argsort(dim=1).tolist()  # the draft model's id of each of the target's

    def model(request: int, path: Path) -> torch.Tensor:
        return logits_after(request, tuple(own[request][token] for token in path))

    batch = batch_of(budgets, [0.0] * 6)
    with levels(of_fixed_size=of_fixed_size):
        plain = grown(dynamic_grower_of(batch, 2, 3, min_prob=min_prob), 6)
        mapped = grown(dynamic_grower_of(batch, 2, 3, tables, min_prob=min_prob), 6, model)
    depths = {max(map(len, tokens_of(plain, b))) for b in range(6)}
    assert len(depths) > 1, "no request stopped before another"
    for b in range(6):
        expected = [tuple(tables[b, token].item() for token in path) for path in tokens_of(plain, b)]
        assert tokens_of(mapped, b) == expected


@pytest.mark.parametrize("of_fixed_size", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, BY_WORTH])
@pytest.mark.parametrize("budgets", [[100], [100, 100, 3], [1, 2, 4, 7], [4], [2, 4]])
def test_a_static_tree_has_the_likeliest_tokens_in_its_shape(shape, budgets, of_fixed_size):
    tree = TokenTree.parse(shape)
    with levels(of_fixed_size=of_fixed_size):
        draft = grown(grower_of(batch_of(budgets, [0.0] * len(budgets)), tree), len(budgets))
    check_draft(draft, budgets, VOCAB, CPU)
    for b, budget in enumerate(budgets):
        tokens: dict[Path, Path] = {(): ()}
        for path in tree.paths:
            above = tokens[path[:-1]]
            ranked = logits_after(b, above).argsort(descending=True).tolist()
            tokens[path] = (*above, ranked[path[-1]])
        places = tree.order or range(len(tree.paths))
        assert tokens_of(draft, b) == [tokens[tree.paths[place]] for place in sorted(places[:budget])]
    assert draft.is_chain == (tree.is_chain or max(budgets) == 1)


def dynamic_tree(
    budgets: list[int], top_k: int, depth: int, min_prob: float = 0.0, levels: LevelBudget | None = None
) -> TreeGrower:
    """Return what grows the dynamic trees of greedy requests: chains if top_k is 1."""
    batch = attrs.evolve(batch_of(budgets, [0.0] * len(budgets)), levels=levels)
    if top_k == 1:
        return grower_of(batch, TokenTree.chain(depth + 1), min_prob=min_prob)
    return dynamic_grower_of(batch, top_k, depth, min_prob=min_prob)


def dynamic_reference(request: int, top_k: int, depth: int, budget: int) -> tuple[list[Path], list[float]]:
    """Return one request's dynamic draft tree, computed without tensors: the paths and log probabilities of its nodes,
    in the order in which they were added."""

    def children(score: float, path: Path) -> list[tuple[float, Path]]:
        log_probs = logits_after(request, path).log_softmax(0).tolist()
        best = heapq.nlargest(top_k, range(VOCAB), key=lambda token: log_probs[token])
        return [(score + log_probs[token], (*path, token)) for token in best]

    level = children(0.0, ())
    candidates = list(level)
    for _ in range(depth):
        frontier = sorted(level, key=lambda each: -each[0])[:top_k]
        level = [child for score, path in frontier for child in children(score, path)]
        candidates += level
    kept = set(sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[:budget])
    return [candidates[i][1] for i in sorted(kept)], [candidates[i][0] for i in sorted(kept)]


@settings(max_examples=40, deadline=None)
@given(
    top_k=st.integers(1, 5),
    depth=st.integers(0, 4),
    budgets=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    of_fixed_size=st.booleans(),
)
def test_the_dynamic_tree_is_that_of_the_paper(top_k, depth, budgets, of_fixed_size):
    with levels(of_fixed_size=of_fixed_size):
        draft = grown(dynamic_tree(budgets, top_k, depth), len(budgets))
    check_draft(draft, budgets, VOCAB, CPU)
    for b, budget in enumerate(budgets):
        paths, scores = dynamic_reference(b, top_k, depth, budget)
        assert tokens_of(draft, b) == paths
        probs = draft.scores[draft.offsets[b] : draft.offsets[b + 1]].double()
        product: dict[Path, float] = {(): 0.0}
        for path, prob in zip(paths, probs.tolist(), strict=True):
            product[path] = product[path[:-1]] + float(torch.tensor(prob).log())
        torch.testing.assert_close([product[path] for path in paths], scores, atol=1e-4, rtol=1e-4)
    deepest = max(len(path) for b in range(len(budgets)) for path in tokens_of(draft, b))
    assert draft.max_depth >= deepest if of_fixed_size else draft.max_depth == deepest


@settings(max_examples=40, deadline=None)
@given(
    top_k=st.integers(1, 4),
    min_prob=st.floats(0.001, 0.9),
    budgets=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    of_fixed_size=st.booleans(),
)
def test_a_request_has_no_level_below_one_that_is_all_unlikely(top_k, min_prob, budgets, of_fixed_size):
    with levels(of_fixed_size=of_fixed_size):
        draft = grown(dynamic_tree(budgets, top_k, 3, min_prob), len(budgets))
    check_draft(draft, budgets, VOCAB, CPU)
    for b, budget in enumerate(budgets):
        candidates = list(zip(*dynamic_reference(b, top_k, 3, 10**6), strict=True))
        best = [max(score for path, score in candidates if len(path) == depth) for depth in (1, 2, 3, 4)]
        depth = next((depth for depth in (0, 1, 2) if best[depth] < math.log(min_prob)), 3)
        assert tokens_of(draft, b) == dynamic_reference(b, top_k, min(depth, max(budgets) - 1), budget)[0]


def test_more_children_than_tokens():
    draft = grown(dynamic_grower_of(batch_of([1000], [0.0]), VOCAB + 5, 1), 1)
    assert draft.num_nodes == VOCAB + VOCAB * VOCAB


@pytest.mark.parametrize("of_fixed_size", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_cost_one_request_its_draft(bad, of_fixed_size):
    logits = torch.stack([logits_after(0, ()), torch.full((VOCAB,), bad)])
    growers = (
        lambda: dynamic_grower_of(batch_of([5, 5], [0.0, 0.0]), 2, 2),
        lambda: grower_of(batch_of([5, 5], [0.0, 0.0]), TokenTree.chain(5)),
        lambda: grower_of(batch_of([5, 5], [0.0, 0.8]), TokenTree.chain(5), "probabilistic"),
        lambda: grower_of(batch_of([5, 5], [0.0, 0.8]), TokenTree.parse(SHAPES[-1]), "probabilistic"),
    )
    for make in growers:
        with levels(of_fixed_size=of_fixed_size):
            grower = make()
        draft = grow(grower, logits, lambda level: torch.stack([logits_after(0, ())] * len(level.token_ids)))
        check_draft(draft, [5, 5], VOCAB, CPU)
        assert draft.num_live_per_request == [5, 0]


def test_tokens_of_another_vocabulary():
    to_target = torch.arange(VOCAB).flip(0) * 3
    plain, mapped = (grown(dynamic_grower_of(batch_of([6], [0.0]), 3, 0, table), 1) for table in (None, to_target))
    assert mapped.token_ids.tolist() == to_target[plain.token_ids].tolist()


@given(st.text(max_size=30) | st.lists(st.lists(st.integers(-1, 3), max_size=3), max_size=6))
def test_a_shape_is_a_tree_or_an_error_that_says_what_to_give(given_shape):
    try:
        tree = TokenTree.parse(given_shape)
    except ConfigError:
        return
    assert sum(tree.num_children) == len(tree.paths)
    assert TokenTree.parse(str(list(reversed(tree.paths)))) == tree


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("[(0,), (0, 1)]", r"has the path \(0, 1\) without \(0, 0\): add it"),
        ("[(0,), (1, 0)]", r"has the path \(1, 0\) without \(1,\): add it"),
        ("[(0,), (0,)]", "must have every path once"),
        ("[]", "must have every path once, and at least one"),
        ("(0,)", "not a list of paths"),
        ("__import__('os')", "not a list of paths"),
    ],
)
def test_what_is_no_tree_is_explained(shape, message):
    with pytest.raises(ConfigError, match=message):
        TokenTree.parse(shape)


def test_a_shape_in_numbers():
    tree = TokenTree.parse([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    assert (tree.depth, tree.is_chain, tree.num_children) == (2, False, (2, 1, 2, 0, 0, 0))
    assert tree.first_children == (1, 3, 4, 6, 6, 6)
    assert TokenTree.chain(3) == TokenTree.parse("[(0,), (0, 0), (0, 0, 0)]")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_is_cut_is_its_first_nodes(shape):
    tree = TokenTree.parse(shape)
    assert tree.widths == tuple(sum(len(path) == depth for path in tree.paths) for depth in range(1, tree.depth + 1))
    assert tree.num_inner == sum(len(path) < tree.depth for path in tree.paths)
    for n in range(1, len(tree.paths) + 2):
        assert TokenTree.parse(str(list(tree.first(n).paths))).paths == tree.paths[:n], "it is no tree"


def test_a_shape_is_kept_in_its_order():
    paths = [(0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (3,)]
    tree = TokenTree.by_worth(paths)
    assert tree.paths == TokenTree.parse(paths).paths
    for most in range(len(paths) + 2):
        assert tree.num_children_kept(most) == tuple(
            sum(path[:-1] == parent for path in paths[:most]) for parent in ((), *tree.paths)
        )


@pytest.mark.parametrize("paths", [[(0, 0), (0,), (1,)], [(0,), (1, 0), (1,)], [(1,), (0,)]])
def test_an_order_in_which_a_node_comes_too_early_is_refused(paths):
    with pytest.raises(ConfigError, match="comes before its parent or an elder sibling"):
        TokenTree.by_worth(paths)


def test_a_config_with_a_shape():
    config = DraftTreeConfig(speculative_token_tree="[(0,), (1,), (0, 0)]")
    assert config.default_num_speculative_tokens(CPU) == 3
    assert config.shape(9).paths == ((0,), (1,), (0, 0))
    assert config.shape(2).paths == ((0,), (1,))
    config.check(3)
    for number in (2, 4):
        with pytest.raises(
            ConfigError, match=f"num_speculative_tokens={number}, but speculative_token_tree has 3 nodes"
        ):
            config.check(number)
    plain = DraftTreeConfig()
    plain.check(1000)
    assert (plain.default_num_speculative_tokens(CPU), plain.shape(3)) == (5, TokenTree.chain(3))
