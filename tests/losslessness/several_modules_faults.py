"""Deliberate faults in the proposer with several MTP modules. The target is unaffected."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specdec_core import DraftPass, RequestTensors
from specdec_proposer_mtp import loading, several
from specdec_proposer_mtp.several import SeveralModules

Patch = pytest.MonkeyPatch


def the_first_module_drafts_all_tokens(patch: Patch) -> None:
    names = loading.names_in_module
    patch.setattr(loading, "names_in_module", lambda family, num_layers, index=0: names(family, num_layers))


def _observing(patch: Patch, change: Any) -> None:
    """Change the forward passes with which `observe` computes the deeper modules' slots. change: a function that takes
    a `DraftPass` and the request's features, and returns both."""
    observe, run = SeveralModules.observe, SeveralModules._run_depth
    within: list[Any] = []

    def noted(self: Any, observation: Any) -> None:
        within.append(observation)
        observe(self, observation)
        within.clear()

    def changed(self: Any, depth: int, passed: DraftPass, features: torch.Tensor) -> Any:
        return run(self, depth, *(change(within[0], passed, features) if within and depth else (passed, features)))

    patch.setattr(SeveralModules, "observe", noted)
    patch.setattr(SeveralModules, "_run_depth", changed)


def deeper_slots_of_drafted_tokens_stay(patch: Patch) -> None:
    """Slots of the deeper modules that were computed while drafting stay, though other tokens were accepted."""

    def skip(observation: Any, passed: DraftPass, features: torch.Tensor) -> Any:
        metadata = passed.metadata
        begins = torch.tensor([0, *metadata.lengths]).cumsum(0)
        for b, request in enumerate(observation.requests):
            if observation.starts[b] >= request.num_prompt_tokens:
                metadata.slot_mapping[begins[b] : begins[b + 1]] = -1
        return passed, features

    _observing(patch, skip)


def deeper_modules_read_tokens_one_earlier(patch: Patch) -> None:
    def shift(observation: Any, passed: DraftPass, features: torch.Tensor) -> Any:
        return attrs.evolve(passed, token_ids=passed.token_ids.roll(1)), features

    _observing(patch, shift)


def deeper_modules_read_outputs_one_later(patch: Patch) -> None:
    _observing(patch, lambda observation, passed, features: (passed, features.roll(-1, 0)))


def deeper_slots_stand_one_further(patch: Patch) -> None:
    """The slots of draft tokens in every depth are those of depth 0."""
    over_level = SeveralModules._over_level
    patch.setattr(SeveralModules, "_over_level", lambda self, depth, *args: over_level(self, 0, *args))


def outputs_before_the_first_row_are_zero(patch: Patch) -> None:
    """What the modules computed with a request's last token is not kept until the next observation."""
    take = RequestTensors.take
    observe = SeveralModules.observe
    within: list[bool] = []

    def noted(self: Any, observation: Any) -> None:
        within.append(True)
        observe(self, observation)
        within.clear()

    def taken(self: Any, requests: Any) -> Any:
        found = take(self, requests)
        return [torch.zeros_like(each) for each in found] if within else found

    patch.setattr(SeveralModules, "observe", noted)
    patch.setattr(RequestTensors, "take", taken)


def texts_begin_with_slots_for_all_tokens(patch: Patch) -> None:
    """The first tokens of a text get a slot in every depth, all at its slot 0."""
    over_tokens = DraftPass.over_tokens.__func__
    rows = several._rows_with_slots
    patch.setattr(several, "_rows_with_slots", lambda observation, depth: rows(observation, 0))

    def clamped(cls: Any, attention: Any, requests: Any, starts: Any, lengths: Any, tokens: Any, positions: Any) -> Any:
        return over_tokens(cls, attention, requests, starts, lengths, tokens, positions.clamp(min=0))

    patch.setattr(DraftPass, "over_tokens", classmethod(clamped))


SEVERAL_MODULES_FAULTS = [
    the_first_module_drafts_all_tokens,
    deeper_slots_of_drafted_tokens_stay,
    deeper_modules_read_tokens_one_earlier,
    deeper_modules_read_outputs_one_later,
    deeper_slots_stand_one_further,
    outputs_before_the_first_row_are_zero,
    texts_begin_with_slots_for_all_tokens,
]
