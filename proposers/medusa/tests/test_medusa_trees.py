"""Tests that the search for a tree, and the trees that are drafted, are those of the reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import drafts, target_info
from hypothesis import given, settings, strategies as st
from medusa_reference import choices_from_accuracies as searched, tree_candidates
from tiny_medusa import HIDDEN_SIZE, LAYOUTS, OF_THE_TARGET, VOCAB_SIZE, write_medusa

from specdec_core import LastHiddenProposer, RequestTensors, StaticTree
from specdec_proposer_medusa import choices, loading
from specdec_proposer_medusa.choices import VICUNA_7B, choices_from_accuracies

CHOICES = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,), (1, 0), (0, 0, 1), (0, 0, 2), (1, 1)]
ROOM = (20, 3, 1, 7, 2, 10)
SHARES = st.one_of(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), st.floats(0, 1))
TABLES = st.lists(st.lists(SHARES, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(TABLES, st.integers(0, 30))
def test_the_tree_that_is_found_is_the_references(table, num_nodes):
    assert choices_from_accuracies(table, num_nodes) == searched(table, num_nodes)


@pytest.mark.parametrize("num_nodes", [1, 7, 63])
def test_the_default_trees_are_the_references(num_nodes):
    for num_heads in (1, 2, 5):
        assert choices_from_accuracies(VICUNA_7B[:num_heads], num_nodes) == searched(VICUNA_7B[:num_heads], num_nodes)


def test_a_search_that_prefers_children_is_noticed(monkeypatch):
    push = choices.heappush

    def children_first(heap: list[Any], entry: tuple[Any, ...]) -> None:
        gain, (turn, is_child), path = entry
        push(heap, (gain, (turn, -is_child), path))

    monkeypatch.setattr(choices, "heappush", children_first)
    ties = [[0.5, 0.25], [0.5, 0.25]]
    assert choices_from_accuracies(ties, 4) != searched(ties, 4)


def trees_that_differ(
    folder: Path, name: str, wanted: list[tuple[int, ...]] = CHOICES, room: tuple[int, ...] = ROOM, **options: Any
) -> list[int]:
    """Write heads and draft with the plugin for a batch of requests. Returns the requests whose tree is not the
    reference's, cut to its max_draft_tokens.

    wanted: the shape of the trees. options: the method's own keys; none: medusa_choices. A tree that is built is cut in
        the order in which its nodes were found, a given one level by level.
    """
    options = options or {"medusa_choices": wanted}
    is_given = {"medusa_choices", "speculative_token_tree"} & {*options}
    kept = sorted(wanted, key=lambda path: (len(path), path)) if is_given else wanted
    heads, generator = write_medusa(folder, LAYOUTS[name], torch.float64), torch.Generator().manual_seed(5)
    hidden = torch.randn(len(room), HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    roots = torch.randint(VOCAB_SIZE, (len(room),), generator=generator).tolist()
    draft = drafts(
        "medusa",
        target_info(VOCAB_SIZE, HIDDEN_SIZE, torch.float64),
        hidden,
        roots,
        room,
        num_speculative_tokens=len(wanted),
        model=folder,
        output_head=(lambda hidden: hidden @ heads.lm_head.T) if name == OF_THE_TARGET else None,
        **options,
    )
    differing = []
    for i, (root, most) in enumerate(zip(roots, room, strict=True)):
        nodes = tree_candidates(heads.logits(hidden[i]), root, kept[:most])[1:]
        if list(zip(*draft.tree(i), strict=True)) != [(token, parent - 1) for token, parent, _ in nodes]:
            differing.append(i)
    return differing


@pytest.mark.parametrize("name", ["safetensors", OF_THE_TARGET, "vLLM, some tokens", "vLLM, some tokens of all"])
def test_drafts_are_the_references(name, tmp_path):
    assert trees_that_differ(tmp_path, name) == []


TWO_OF_THREE = [[0.5, 0.2, 0.1], [0.4, 0.1], [0]]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"speculative_token_tree": CHOICES}, CHOICES),
        ({"speculative_token_tree": [(0,), (0, 0), (0, 0, 0)]}, [(0,), (0, 0), (0, 0, 0)]),
        ({"medusa_head_accuracies": TWO_OF_THREE}, searched(TWO_OF_THREE, 6)),
        ({"draft_sample_method": "greedy"}, searched(VICUNA_7B[:3], 7)),
        ({"draft_sample_method": "greedy"}, searched(VICUNA_7B[:3], 25)),
        ({"draft_sample_method": "probabilistic"}, [(0,), (0, 0), (0, 0, 0)]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else len(value),
)
def test_the_shape_of_drafts_is_the_given_one_or_the_best(options, wanted, tmp_path):
    assert trees_that_differ(tmp_path, "two layers", wanted, **options) == []


@pytest.mark.parametrize("room", [(1, 1), (2, 2, 2, 2), (4, 1, 3, 2)])
def test_a_draft_that_is_cut_is_the_beginning_of_the_whole_one(room, tmp_path):
    assert trees_that_differ(tmp_path, "safetensors", room=room) == []


def nodes_follow_another_request(patch: pytest.MonkeyPatch) -> None:
    take = RequestTensors.take
    patch.setattr(RequestTensors, "take", lambda self, requests: [each.roll(1, 0) for each in take(self, requests)])


def the_last_row_is_taken_whether_it_counts_or_not(patch: pytest.MonkeyPatch) -> None:
    def observe(self: Any, observation: Any) -> None:
        rows = torch.tensor(observation.offsets[1:]) - 1
        self._last.put(observation.requests, observation.features["final"][rows])

    patch.setattr(LastHiddenProposer, "observe", observe)


def requests_are_observed_in_the_order_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    put = RequestTensors.put
    patch.setattr(
        RequestTensors, "put", lambda self, requests, *values: put(self, sorted(requests, key=lambda r: r.id), *values)
    )


def draft_ids_are_not_mapped(patch: pytest.MonkeyPatch) -> None:
    load = loading.load

    def unmapped(*args: Any) -> Any:
        module, ids = load(*args)
        return module, torch.arange(len(ids))

    patch.setattr(loading, "load", unmapped)


def siblings_are_in_another_order(patch: pytest.MonkeyPatch) -> None:
    grow = StaticTree.grow
    patch.setattr(StaticTree, "grow", lambda self, logits: grow(self, -logits))


@pytest.mark.parametrize(
    "mistake",
    [
        nodes_follow_another_request,
        the_last_row_is_taken_whether_it_counts_or_not,
        requests_are_observed_in_the_order_of_the_batch,
        draft_ids_are_not_mapped,
        siblings_are_in_another_order,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_mistakes_are_noticed(mistake, tmp_path, monkeypatch):
    mistake(monkeypatch)
    assert trees_that_differ(tmp_path, "vLLM, some tokens")
