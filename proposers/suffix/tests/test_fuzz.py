"""Compares every draft of the method `suffix` with the reference implementation over thousands of random requests.

With SPECDEC_NIGHTLY set, a million operations are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from suffix_fuzz import VOCABULARY, Drafted, Fuzz, Plan, View
from suffix_plans import NUM_OPERATIONS, PLANS, TREES

import specdec_proposer_suffix as suffix
from specdec_core import BuildContext, Proposer, TargetInfo
from specdec_testing.drive import batch_of

CPU = torch.device("cpu")


def build(plan: Plan) -> Proposer:
    (spec,) = suffix.specdec_proposers()
    options = plan.options
    config = spec.config(
        suffix_decoding_max_tree_depth=options.depth,
        suffix_decoding_max_cached_requests=options.max_cached_requests,
        suffix_decoding_max_spec_factor=options.factor,
        suffix_decoding_max_spec_offset=options.offset,
        suffix_decoding_min_token_prob=options.min_prob,
        suffix_decoding_use_tree=plan.use_tree,
    )
    vocab_size = max(VOCABULARY) + plan.num_symbols
    target = TargetInfo("none", "none", vocab_size, 8, 1, 2**20, torch.float32, CPU)

    def not_used(*_: Any) -> Any:
        raise AssertionError("nothing of the target is needed")

    context = BuildContext(
        target=target,
        num_speculative_tokens=plan.budget,
        max_num_seqs=plan.max_active,
        max_num_batched_tokens=2**20,
        device=CPU,
        embed=not_used,
        output_head=not_used,
        output_rows=not_used,
        attention=None,
        load_model=not_used,
        speed_up=not_used,
    )
    return spec.build(config, context)


@define
class PluginSubject:
    plan: Plan
    proposer: Proposer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.proposer = build(self.plan)

    def start(self, request: View) -> None:
        self.proposer.start(request)

    def propose(self, requests: Sequence[View], budgets: Sequence[int]) -> list[Drafted]:
        with torch.inference_mode():
            draft = self.proposer.propose(batch_of(requests, budgets, temperature=0.0))
        assert draft.q_rows is None or bool((draft.q_rows == -1).all())
        depths = [tree_depth(draft.tree(i).parents) for i in range(draft.batch_size)]
        assert draft.max_depth >= max(depths)
        assert draft.scores is not None or draft.num_nodes == 0
        scores = [] if draft.scores is None else draft.scores.tolist()
        return [
            Drafted(*draft.tree(i), scores[draft.offsets[i] : draft.offsets[i + 1]]) for i in range(draft.batch_size)
        ]

    def reset(self, request: View) -> None:
        self.proposer.reset(request)

    def finish(self, request: View) -> None:
        self.proposer.finish(request, "length")


def tree_depth(parents: list[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


ALL = PLANS | TREES


@pytest.mark.parametrize("name", ALL)
def test_every_draft_is_one_that_the_reference_allows(name):
    plan = evolve(ALL[name], num_operations=NUM_OPERATIONS)
    figures = Fuzz(plan, PluginSubject(plan), Random(1)).run()
    assert figures.num_evicted > 0 or plan.options.max_cached_requests in (0, 50)
    assert figures.events["reset"] > 0
    assert figures.events["id used again"] > 0
    assert plan.use_tree or figures.events["only one draft allowed"] > 0.75 * figures.events["draft"]
