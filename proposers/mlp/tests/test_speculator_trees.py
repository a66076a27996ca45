"""Tests that the trees of the most probable paths are those of the reference implementation, however they are cut."""

from __future__ import annotations

import itertools
import math
import operator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from draft_heads import drafts, target_info, write_checkpoint
from mlp_reference import candidates, greedy_chain, prefix_tree, random_hidden, random_weights

from specdec_core import Level
from specdec_proposer_mlp.candidates import CandidateTree

VOCAB_SIZE, HIDDEN_SIZE = 48, 32
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "emb_dim": HIDDEN_SIZE, "inner_dim": 24}
HEADS = {"n_predict": 3, "top_k_tokens_per_head": [4, 3, 2], "n_candidates": 5}
TIED = HEADS | {"tie_weights": True, "scale_input": True}
CASES: list[dict[str, Any]] = [
    HEADS,
    TIED,
    HEADS | {"n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2], "n_candidates": 8},
    HEADS | {"n_candidates": 1},
    HEADS | {"n_candidates": 24},
]
ROOM = (20, 3, 1, 7, 2, 200)


def trees_that_differ(
    folder: Path, case: dict[str, Any], max_draft_tokens: tuple[int, ...] = ROOM, **options: Any
) -> list[int]:
    """Write a speculator and draft with the plugin for a batch of requests. Returns the requests whose tree is not the
    reference's, cut to its max_draft_tokens.

    options: the method's own keys; None: a tree as the case has it.
    """
    config, generator = {**SIZES, **case}, torch.Generator().manual_seed(5)
    weights = random_weights(config, generator)
    model = write_checkpoint(folder, config, weights)
    hidden = torch.stack([random_hidden(config, generator) for _ in max_draft_tokens])
    roots = torch.randint(VOCAB_SIZE, (len(max_draft_tokens),), generator=generator).tolist()
    options = options or {"n_candidates": case["n_candidates"]}
    widths = itertools.accumulate(options.get("top_k_tokens_per_head", case["top_k_tokens_per_head"]), operator.mul)
    number = sum(min(width, options.get("n_candidates", 1)) for width in widths)
    target = target_info(VOCAB_SIZE, HIDDEN_SIZE, torch.float64)
    draft = drafts(
        "mlp_speculator", target, hidden, roots, max_draft_tokens, num_speculative_tokens=number, model=model, **options
    )
    config |= {key: value for key, value in options.items() if key == "top_k_tokens_per_head"}
    differing = []
    for i, (root, most) in enumerate(zip(roots, max_draft_tokens, strict=True)):
        if "n_candidates" in options:
            nodes = prefix_tree(root, candidates(weights, config, hidden[i], root)[0])[1:]
            expected = [(token, parent - 1) for token, parent, _ in nodes]
        else:
            chain = greedy_chain(weights, config, hidden[i], root, case["n_predict"])
            expected = [(token, depth - 1) for depth, token in enumerate(chain)]
        if list(zip(*draft.tree(i), strict=True)) != expected[:most]:
            differing.append(i)
    return differing


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["n_candidates"]))
def test_trees_are_the_references(case, tmp_path):
    assert trees_that_differ(tmp_path, case) == []


@pytest.mark.parametrize("room", [(1, 1), (2, 2, 2, 2), (2, 1, 3, 2)])
def test_a_draft_that_is_cut_is_the_beginning_of_the_whole_one(room, tmp_path):
    """With little room in the whole batch, drafts are the same as beside a request with more room."""
    for i, case in enumerate(CASES):
        assert trees_that_differ(tmp_path / str(i), case, room) == []


def test_the_users_numbers_of_children_count(tmp_path):
    assert trees_that_differ(tmp_path, HEADS, n_candidates=5, top_k_tokens_per_head=[2, 1, 5]) == []
    assert trees_that_differ(tmp_path, HEADS | {"n_candidates": 4}, n_candidates=4) == []


def test_chains_are_the_references(tmp_path):
    given = {"draft_sample_method": "greedy"}
    assert trees_that_differ(tmp_path, HEADS, **given) == []
    assert trees_that_differ(tmp_path, TIED, (1, 3, 2), **given) == []


def scores_are_those_of_the_last_token(tree: Any) -> None:
    tree._scores = torch.zeros_like(tree._scores)


def only_the_likeliest_paths_go_on(tree: Any) -> None:
    tree._top_k = [*tree._top_k[:1], *[1] * (len(tree._top_k) - 1)]


def the_tree_is_as_deep_as_the_batch_has_room(tree: Any) -> None:
    tree._top_k = tree._top_k[: max(tree._budgets)]


def paths_follow_those_of_another_request(tree: Any) -> None:
    if tree._token_ids:
        tree._token_ids[-1] = tree._token_ids[-1].roll(1, 0)


@pytest.mark.parametrize(
    "mistake",
    [
        scores_are_those_of_the_last_token,
        only_the_likeliest_paths_go_on,
        the_tree_is_as_deep_as_the_batch_has_room,
        paths_follow_those_of_another_request,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_mistakes_are_noticed(mistake, tmp_path, monkeypatch):
    grow = CandidateTree.grow

    def changed(self: Any, logits: torch.Tensor) -> Level | None:
        mistake(self)
        return grow(self, logits)

    monkeypatch.setattr(CandidateTree, "grow", changed)
    assert trees_that_differ(tmp_path / "some", CASES[2]) + trees_that_differ(tmp_path / "little", CASES[2], (2,) * 12)


def test_states_of_another_path_are_noticed(tmp_path, monkeypatch):
    grow = CandidateTree.grow

    def changed(self: Any, logits: torch.Tensor) -> Level | None:
        level = grow(self, logits)
        return level and attrs.evolve(level, rows=level.rows.roll(level.width // 2))

    monkeypatch.setattr(CandidateTree, "grow", changed)
    assert trees_that_differ(tmp_path, HEADS)


def test_scores_along_a_path_multiply_to_its_probability(tmp_path):
    config, generator = {**SIZES, **HEADS}, torch.Generator().manual_seed(5)
    weights = random_weights(config, generator)
    hidden = random_hidden(config, generator)
    given = {"num_speculative_tokens": 14, "model": write_checkpoint(tmp_path, config, weights), "n_candidates": 5}
    target = target_info(VOCAB_SIZE, HIDDEN_SIZE, torch.float64)
    draft = drafts("mlp_speculator", target, hidden[None], [1], [14], **given)
    tree, scores = draft.tree(0), draft.scores.tolist()
    for path, log_prob in zip(*candidates(weights, config, hidden, 1), strict=True):
        node, product = -1, 1.0
        for token in path:
            (node,) = (n for n, (t, p) in enumerate(zip(*tree, strict=True)) if (t, p) == (token, node))
            product *= scores[node]
        assert product == pytest.approx(math.exp(log_prob), rel=1e-4)


def test_a_request_whose_logits_are_not_finite_has_no_draft(tmp_path):
    config, generator = {**SIZES, **HEADS}, torch.Generator().manual_seed(5)
    model = write_checkpoint(tmp_path, config, random_weights(config, generator))
    hidden = torch.stack([random_hidden(config, generator) for _ in range(3)])
    hidden[1] = torch.nan
    target = target_info(VOCAB_SIZE, HIDDEN_SIZE, torch.float64)
    given = {"num_speculative_tokens": 14, "model": model, "n_candidates": 5}
    draft = drafts("mlp_speculator", target, hidden, [1, 2, 3], [15] * 3, **given)
    assert draft.tree(1).token_ids == []
    others = drafts("mlp_speculator", target, hidden[::2], [1, 3], [15] * 2, **given)
    assert [draft.tree(0), draft.tree(2)] == [others.tree(0), others.tree(1)]
