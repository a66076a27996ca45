"""Deliberate faults in a draft model's forward passes over its own draft tokens. The tests of every proposer with
layers must notice these faults.

`fix_levels` pads each level of a draft tree to a fixed size with dead (padding) entries, as on a GPU. It also fills the
KV cache with NaN, so that reading unwritten memory changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from specdec_core import DraftPass, DraftSlots, Level
from specdec_core.contracts.kv import Visibility
from specdec_core.drafting import dynamic, static
from specdec_core.kv import PagedKVManager
from specdec_core.models.attention import PagedAttention

Patch = pytest.MonkeyPatch


def _see(patch: Patch, change: Callable[[Visibility], Visibility]) -> None:
    over_level = DraftPass.over_level.__func__

    def changed(cls: Any, *args: Any) -> DraftPass:
        passed = over_level(cls, *args)
        return attrs.evolve(passed, visibility=change(passed.visibility))

    patch.setattr(DraftPass, "over_level", classmethod(changed))


def nodes_stand_one_further(patch: Patch) -> None:
    _see(patch, lambda seen: attrs.evolve(seen, positions=seen.positions + 1))


def nodes_do_not_see_the_slot_before_them(patch: Patch) -> None:
    _see(patch, lambda seen: attrs.evolve(seen, prefix_lens=(seen.prefix_lens - 1).clamp(min=0)))


def nodes_see_no_ancestors(patch: Patch) -> None:
    _see(patch, lambda seen: attrs.evolve(seen, more_slots=seen.more_slots[:, :1].expand_as(seen.more_slots)))


def _change_chains(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    of_chain = DraftSlots.of_chain
    patch.setattr(DraftSlots, "of_chain", lambda self, depth: change(of_chain(self, depth), of_chain(self, 1)))


def chains_overwrite_the_slot_of_their_first_token(patch: Patch) -> None:
    def change(own: Any, first: Any) -> Any:
        return attrs.evolve(own[0], slot_mapping=first[0].slot_mapping), own[1]

    _change_chains(patch, change)


def chains_see_only_their_first_token(patch: Patch) -> None:
    _change_chains(patch, lambda own, first: (own[0], attrs.evolve(own[1], prefix_lens=first[1].prefix_lens)))


def windows_are_one_wider(patch: Patch) -> None:
    _window(patch, lambda window: window + 1)


def windows_are_one_narrower(patch: Patch) -> None:
    _window(patch, lambda window: window - 1)


def _window(patch: Patch, change: Callable[[int], int]) -> None:
    using = PagedAttention.using

    def changed(self: Any, plan: Any, window: int | None = None, rows: Any = None) -> Any:
        return using(self, plan, None if window is None else change(window), rows)

    patch.setattr(PagedAttention, "using", changed)


WINDOW_FAULTS = [windows_are_one_wider, windows_are_one_narrower]
CHAIN_FAULTS = [chains_overwrite_the_slot_of_their_first_token, chains_see_only_their_first_token]
PASS_FAULTS = [nodes_stand_one_further, nodes_do_not_see_the_slot_before_them, nodes_see_no_ancestors]


def fix_levels(patch: Patch) -> None:
    for module in (static, dynamic):
        patch.setattr(module, "may_shrink", lambda device: False)
    add_group = PagedKVManager.add_group

    def filled(self: Any, layout: Any, *more: Any) -> int:
        number = add_group(self, layout, *more)
        for layer in range(layout.num_layers):
            for storage in self.cache(number, layer):
                storage.fill_(torch.nan)
        return number

    patch.setattr(PagedKVManager, "add_group", filled)


def num_dead(patch: Patch) -> list[int]:
    """Return a list that records the number of dead (padding) entries in each tree level that is drafted from now
    on."""
    seen: list[int] = []
    over_level = DraftPass.over_level.__func__

    def counted(cls: Any, slots: Any, level: Level) -> DraftPass:
        seen.append(0 if level.is_alive is None else int((~level.is_alive).sum()))
        return over_level(cls, slots, level)

    patch.setattr(DraftPass, "over_level", classmethod(counted))
    return seen


def dead_entries_overwrite_the_slot_before_the_nodes(patch: Patch) -> None:
    over_level = DraftPass.over_level.__func__

    def overwriting(cls: Any, slots: DraftSlots, level: Level) -> DraftPass:
        passed = over_level(cls, slots, level)
        if level.is_alive is not None:
            before = [max(0, first - 1) for first in slots.first.tolist()]
            mapping = slots.attention.metadata(slots.requests, before, [1] * len(before)).slot_mapping
            of = torch.from_numpy(level.requests.repeat(level.width))
            passed.metadata.slot_mapping[~level.is_alive] = mapping[of][~level.is_alive]
        return passed

    patch.setattr(DraftPass, "over_level", classmethod(overwriting))
