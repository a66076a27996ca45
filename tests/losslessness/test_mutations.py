"""Tests of the tests: with a deliberate fault in the engine, the losslessness tests must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import random_tree
import torch
from reference import NUM_TOKENS

from specdec_core.engine import step_batch
from specdec_core.engine.step_batch import StepBatch
from specdec_core.kv import PagedKVManager
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers import accepted_and_bonus, chosen, greedy

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")


def nodes_one_position_late(patch: Patch) -> None:
    of = StepBatch.of

    def late(schedule: Any, draft: Any, *args: Any) -> Any:
        batch = of(schedule, draft, *args)
        batch.positions[batch.rows[draft.layout.node_rows]] += 1
        return batch

    patch.setattr(StepBatch, "of", late)


def see_instead(patch: Patch, change: Callable[[Any], Any]) -> None:
    tree_mask = step_batch.tree_mask
    patch.setattr(step_batch, "tree_mask", lambda *args: change(tree_mask(*args)))


def nodes_see_their_siblings(patch: Patch) -> None:
    def show_all(seen: Any) -> Any:
        prefix_lens, more_slots = seen
        return seen if more_slots is None else (np.maximum(prefix_lens, more_slots.max(axis=1) + 1), more_slots)

    see_instead(patch, show_all)


def nodes_see_only_the_root(patch: Patch) -> None:
    see_instead(patch, lambda seen: (seen[0], None))


def accepted_entries_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(PagedKVManager, "_move", lambda *args: None)


def the_first_node_is_kept_instead_of_the_accepted_one(patch: Patch) -> None:
    move = PagedKVManager._move

    def wrong(self: Any, request_ids: Any, first_nodes: Any, verdict: Any) -> None:
        rows = verdict.rows.clone()
        rows[:, 1:] = rows[:, :1] + 1
        move(self, request_ids, first_nodes, attrs.evolve(verdict, rows=rows))

    patch.setattr(PagedKVManager, "_move", wrong)


def a_rejected_node_stays_in_the_cache(patch: Patch) -> None:
    """A deliberate fault: the root's keys and values are not written, so attention reads what a rejected draft token
    left in the root's slot.

    New KV caches are filled with ones, since reused memory could hold the right values from an earlier engine.
    """
    metadata, add_group = PagedKVManager.metadata, PagedKVManager.add_group

    def with_ones(self: Any, *arguments: Any) -> int:
        number = add_group(self, *arguments)
        for storage in (self._groups[number].keys, self._groups[number].values):
            storage.fill_(1)
        return number

    def stale(self: Any, request_ids: Any, starts: Any, lengths: Any) -> Any:
        found = metadata(self, request_ids, starts, lengths)
        slots = found.slot_mapping.clone()
        slots[[sum(lengths[:i]) for i, length in enumerate(lengths) if length > 1 and starts[i] > 0]] = -1
        return attrs.evolve(found, slot_mapping=slots)

    patch.setattr(PagedKVManager, "metadata", stale)
    patch.setattr(PagedKVManager, "add_group", with_ones)


def any_child_is_accepted(patch: Patch) -> None:
    follow, walk = accepted_and_bonus.follow, accepted_and_bonus.walk

    def eager(tokens: Any, draft: Any) -> Any:
        layout = draft.layout
        tokens = tokens.clone()
        tokens[layout.parent_rows[layout.is_alive]] = draft.token_ids[layout.is_alive]
        return follow(tokens, draft)

    def eager_walk(pick: Any, draft: Any, requests: Any) -> Any:
        layout = draft.layout
        child = torch.full_like(layout.up, -1)
        child[layout.parent_rows[layout.is_alive]] = draft.token_ids[layout.is_alive]

        def pick_a_child(rows: Any, of: Any, depths: Any) -> Any:
            return torch.where(child[rows] >= 0, child[rows], pick(rows, of, depths))

        return walk(pick_a_child, draft, requests)

    patch.setattr(greedy, "follow", eager)
    patch.setattr(chosen, "follow", eager)
    patch.setattr(chosen, "walk", eager_walk)


def noise_is_shared_by_all_depths(patch: Patch) -> None:
    target_token = CounterRandom.target_token
    patch.setattr(
        CounterRandom,
        "target_token",
        lambda self, weights, requests, depths: target_token(self, weights, requests, torch.zeros_like(depths)),
    )


WRONG_COMPUTATION: list[Callable[[Patch], None]] = [
    nodes_one_position_late,
    nodes_see_their_siblings,
    nodes_see_only_the_root,
    accepted_entries_stay_where_they_were,
    the_first_node_is_kept_instead_of_the_accepted_one,
    a_rejected_node_stays_in_the_cache,
    any_child_is_accepted,
]


@pytest.fixture
def continuations(model_dir: Any, make_llm: Any, prompts: list, generate: Any) -> Callable[..., list]:
    """Return a function that generates and returns the output token ids of all prompts.

    The function's parameters:

    method: the draft method; None: plain decoding.
    truth: the right outputs, from which the proposer random_tree builds its trees.
    mutation: a function that patches a fault into the engine; None: no fault.
    sampling: keyword arguments of SamplingParams.
    """

    def run(method: str | None, truth: list, mutation: Any = None, **sampling: Any) -> list:
        from specdec_core import SamplingParams

        params = [
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, **sampling) for i in range(len(prompts))
        ]
        random_tree.forget_everything()
        random_tree.TRUTH.update(zip(map(tuple, prompts), truth, strict=False))
        with pytest.MonkeyPatch.context() as patch:
            if mutation is not None:
                mutation(patch)
            options = {"observe": False} if method == "random_tree" else None
            llm = make_llm(model_dir, method, options=options)
            return [output.token_ids for output in generate(llm, prompts, params)]

    return run


@pytest.mark.parametrize("mutation", WRONG_COMPUTATION, ids=lambda m: m.__name__)
def test_greedy_equality_notices(mutation: Any, continuations: Any, references: list) -> None:
    assert continuations("random_tree", references, temperature=0.0) == references
    assert continuations("random_tree", references, mutation, temperature=0.0) != references


@pytest.mark.parametrize("mutation", [*WRONG_COMPUTATION, noise_is_shared_by_all_depths], ids=lambda m: m.__name__)
def test_sampled_equality_notices(mutation: Any, continuations: Any) -> None:
    plain = continuations(None, [], temperature=0.8)
    assert continuations("random_tree", plain, temperature=0.8) == plain
    assert continuations("random_tree", plain, mutation, temperature=0.8) != plain
