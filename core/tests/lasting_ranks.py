"""Ranks that several engines use one after the other, since starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from attrs import define, field

from specdec_core.plugins.discovery import Plugin
from specdec_core.ranks import sharing
from specdec_core.ranks.driver import Ranks


class LastingRanks(Ranks):
    """Ranks that forget their models when an engine is closed, and go on, unless they are out of step."""

    @property
    def can_go_on(self) -> bool:
        return self._failure is None and not self._is_out_of_step

    def close(self) -> None:
        if not self.can_go_on:
            self.end()
            return
        self._pending.clear()
        self.is_serving = False
        with self.together("clear"):
            pass

    def end(self) -> None:
        super().close()


@define
class Pool:
    kept: dict[int, LastingRanks] = field(factory=dict)

    def ranks(self, size: int, device: torch.device, plugins: Sequence[Plugin]) -> LastingRanks:
        if size not in self.kept or not self.kept[size].can_go_on:
            self.kept[size] = LastingRanks(size, device, plugins)
        return self.kept[size]


@contextmanager
def lasting_ranks() -> Iterator[None]:
    """A context in which engines of one size that are closed leave their ranks to the next one."""
    pool = Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "Ranks", pool.ranks)
        try:
            yield
        finally:
            for each in pool.kept.values():
                each.end()
