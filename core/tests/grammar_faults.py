"""Faults of masks under a grammar, which tests of them must notice."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.sampling.grammar_state import GrammarState


def the_parent_s_mask(patch: pytest.MonkeyPatch) -> None:
    go_to = GrammarState._go_to
    patch.setattr(GrammarState, "_go_to", lambda self, output, path: go_to(self, output, path[:-1]))


def drafts_count_as_output(patch: pytest.MonkeyPatch) -> None:
    """The matcher stays where the last row was."""
    mask = GrammarState.mask

    def masked(self: GrammarState, *args: Any) -> Any:
        found = mask(self, *args)
        self._below = []
        return found

    patch.setattr(GrammarState, "mask", masked)
