"""Deliberate faults in proposers of heads that read one hidden state of the target, or in what the engine does for
them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specdec_core import LastHiddenProposer, Level, Observation, RequestTensors, StaticTree
from specdec_core.drafting.chain import HostChain
from specdec_core.engine.observer import Observer
from specdec_proposer_medusa.module import MedusaHeads
from specdec_proposer_mlp.candidates import CandidateTree
from specdec_proposer_mlp.module import Speculator

Patch = pytest.MonkeyPatch


def late_observations_are_lost(patch: Patch) -> None:
    patch.setattr(Observer, "catch_up", lambda self, requests: self._arrears.take(requests) and None)


def what_follows_a_cached_prefix_is_not_observed(patch: Patch) -> None:
    put = RequestTensors.put

    def observe(self: Any, observation: Observation) -> None:
        starts = zip(observation.requests, observation.starts, strict=True)
        new = [i for i, (request, start) in enumerate(starts) if start != request.num_cached_tokens or start == 0]
        rows = observation.features["final"][observation.last_rows]
        put(self._last, [observation.requests[i] for i in new], rows[new])

    patch.setattr(LastHiddenProposer, "observe", observe)


def _observe(patch: Patch, change: Any) -> None:
    observe = LastHiddenProposer.observe
    patch.setattr(LastHiddenProposer, "observe", lambda self, observation: observe(self, change(observation)))


def states_are_those_of_the_row_before(patch: Patch) -> None:
    def one_before(observation: Observation) -> Observation:
        first = torch.tensor(observation.offsets[:-1])
        return attrs.evolve(observation, last_rows=torch.maximum(observation.last_rows - 1, first))

    _observe(patch, one_before)


def states_stay_when_a_request_is_preempted(patch: Patch) -> None:
    """A deliberate fault: until its next draft, a preempted request keeps its hidden state from before."""
    observe, hidden = LastHiddenProposer.observe, LastHiddenProposer.hidden
    preempted: set[str] = set()

    def observing(self: Any, observation: Observation) -> None:
        stale = [request for request in observation.requests if request.id in preempted]
        (before,) = self._last.take(stale)
        observe(self, observation)
        self._last.put(stale, before)

    def taking(self: Any, batch: Any) -> torch.Tensor:
        preempted.difference_update(request.id for request in batch.requests)
        return hidden(self, batch)

    patch.setattr(LastHiddenProposer, "reset", lambda self, request: preempted.add(request.id))
    patch.setattr(LastHiddenProposer, "observe", observing)
    patch.setattr(LastHiddenProposer, "hidden", taking)


def states_are_those_of_another_request(patch: Patch) -> None:
    take = RequestTensors.take
    patch.setattr(RequestTensors, "take", lambda self, requests: [each.roll(1, 0) for each in take(self, requests)])


def the_head_before_drafts(patch: Patch) -> None:
    speculator, medusa = Speculator.next_state, MedusaHeads.hidden
    patch.setattr(Speculator, "next_state", lambda self, i, *args: speculator(self, i if i < 2 else i - 1, *args))
    patch.setattr(MedusaHeads, "hidden", lambda self, i, *args: medusa(self, max(0, i - 1), *args))


def _level(patch: Patch, change: Any) -> None:
    for kind in (HostChain, StaticTree, CandidateTree):

        def changed(self: Any, logits: torch.Tensor, grow: Any = kind.grow) -> Level | None:
            level = grow(self, logits)
            return level and attrs.evolve(level, rows=change(level))

        patch.setattr(kind, "grow", changed)


def nodes_follow_those_of_another_request(patch: Patch) -> None:
    _level(patch, lambda level: level.rows.roll(level.width))


def nodes_follow_their_parents_sibling(patch: Patch) -> None:
    _level(
        patch, lambda level: level.rows.view(-1, level.width).amin(1, keepdim=True).expand(-1, level.width).flatten()
    )


def the_logits_are_the_targets(patch: Patch) -> None:
    patch.setattr(MedusaHeads, "hidden", lambda self, i, hidden: hidden)


FAULTS = [
    states_are_those_of_the_row_before,
    states_stay_when_a_request_is_preempted,
    states_are_those_of_another_request,
    the_head_before_drafts,
    nodes_follow_those_of_another_request,
]
