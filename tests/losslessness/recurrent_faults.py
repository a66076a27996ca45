"""Deliberate faults in the states of recurrent layers, which the tests of hybrid targets must notice."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.recurrent import RequestStates
from specdec_core.kv.states import StateStore
from specdec_core.models.recurrent import RecurrentLayers, StatePlan

Patch = pytest.MonkeyPatch


def rejected_nodes_are_replayed_too(patch: Patch) -> None:
    """The state is not rolled back: every draft token changes it, in the order of the draft."""
    plan, replay, drafts = RequestStates.plan, RequestStates.replay, []

    def remember(self: Any, schedule: Any, batch: Any, draft: Any) -> StatePlan:
        drafts.append(draft)
        return plan(self, schedule, batch, draft)

    def all_nodes(self: Any, request_ids: Any, verdict: Any) -> None:
        counts = np.array(drafts[-1].num_nodes_per_request)
        first = np.array(drafts[-1].offsets[:-1]) + np.arange(len(counts))
        rows = first[:, None] + np.minimum(np.arange(counts.max() + 1), counts[:, None])
        replay(self, request_ids, Verdict(verdict.token_ids, torch.from_numpy(rows), torch.from_numpy(counts)))

    patch.setattr(RequestStates, "plan", remember)
    patch.setattr(RequestStates, "replay", all_nodes)


def accepted_nodes_are_not_replayed(patch: Patch) -> None:
    patch.setattr(RecurrentLayers, "replay", lambda self, steps: None)


def nodes_start_from_another_nodes_state(patch: Patch) -> None:
    """From that of the node after their parent's, at the same depth."""
    plan = RequestStates.plan

    def shifted(self: Any, *given: Any) -> StatePlan:
        found = plan(self, *given)
        above = [None, *found.levels][: len(found.levels)]
        levels = [
            each if up is None else attrs.evolve(each, parents=(each.parents + 1) % up.num_tokens)
            for up, each in zip(above, found.levels, strict=True)
        ]
        return attrs.evolve(found, levels=tuple(levels))

    patch.setattr(RequestStates, "plan", shifted)


def states_are_not_cleared(patch: Patch) -> None:
    """A request that starts, or starts over, has the state that its slot had before."""
    patch.setattr(StateStore, "clear", lambda self, slots: None)


FAULTS = [
    rejected_nodes_are_replayed_too,
    accepted_nodes_are_not_replayed,
    nodes_start_from_another_nodes_state,
    states_are_not_cleared,
]
