"""Deliberate faults in proposers of heads that read the target's hidden states of every token (`FeatureProposer`), or
in what the engine gives to them. The tests of every such head must notice these faults."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specdec_core import FeatureProposer, Level, Observation, RequestTensors, StaticTree
from specdec_core.drafting.chain import HostChain

Patch = pytest.MonkeyPatch


def features_of_drafted_nodes_stay(patch: Patch) -> None:
    """A deliberate fault: `observe` does not rewrite the KV-cache entries of accepted draft tokens.

    Entries computed from the draft head's own outputs stay, instead of entries from the target's hidden states.
    """
    observe = FeatureProposer.observe
    forward = FeatureProposer._forward
    seen: list[Observation] = []

    def observing(self: Any, observation: Observation) -> None:
        seen.append(observation)
        observe(self, observation)
        seen.clear()

    def forwarding(self: Any, passed: Any, features: Any, *wanted: Any) -> Any:
        if seen:
            observation = seen[0]
            for i, request in enumerate(observation.requests):
                if observation.starts[i] >= request.num_prompt_tokens:
                    rows = slice(observation.offsets[i] + 1, observation.offsets[i + 1])
                    passed.metadata.slot_mapping[rows] = -1
        return forward(self, passed, features, *wanted)

    patch.setattr(FeatureProposer, "observe", observing)
    patch.setattr(FeatureProposer, "_forward", forwarding)


def _observe(patch: Patch, change: Any) -> None:
    observe = FeatureProposer.observe
    patch.setattr(FeatureProposer, "observe", lambda self, observation: observe(self, change(observation)))


def embeddings_are_those_of_the_features_own_tokens(patch: Patch) -> None:
    patch.setattr(Observation, "following_token_ids", property(lambda self: self.token_ids))


def the_last_row_is_taken_whether_it_counts_or_not(patch: Patch) -> None:
    def take_the_last(observation: Observation) -> Observation:
        return attrs.evolve(observation, last_rows=torch.tensor(observation.offsets[1:]) - 1)

    _observe(patch, take_the_last)


def positions_begin_at_one(patch: Patch) -> None:
    _observe(patch, lambda observation: attrs.evolve(observation, positions=observation.positions + 1))


def the_root_has_another_requests_output(patch: Patch) -> None:
    indices = RequestTensors._indices
    patch.setattr(RequestTensors, "_indices", lambda self, requests: indices(self, requests).roll(1))


def nodes_follow_those_of_another_request(patch: Patch) -> None:
    for kind in (HostChain, StaticTree):

        def rolled(self: Any, logits: torch.Tensor, grow: Any = kind.grow) -> Level | None:
            level = grow(self, logits)
            return level and attrs.evolve(level, rows=level.rows.roll(level.width))

        patch.setattr(kind, "grow", rolled)


FEATURE_FAULTS = [
    nodes_follow_those_of_another_request,
    features_of_drafted_nodes_stay,
    embeddings_are_those_of_the_features_own_tokens,
    the_last_row_is_taken_whether_it_counts_or_not,
    positions_begin_at_one,
    the_root_has_another_requests_output,
]
