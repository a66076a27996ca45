"""Wrong passes over the nodes of a draft: faults that every proposer with layers of its own must be tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from specdec_core import DraftPass
from specdec_core.types import Visibility

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


PASS_FAULTS = [nodes_stand_one_further, nodes_do_not_see_the_slot_before_them, nodes_see_no_ancestors]
