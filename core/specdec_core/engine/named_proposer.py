"""A proposer that is called as its contract says. Whatever it raises comes out as a PluginError that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import frozen

from specdec_core.contracts.proposer import Proposer
from specdec_core.engine.plugin_errors import blaming_in_step
from specdec_core.errors import PluginError


@frozen(eq=False)
class NamedProposer:
    proposer: Proposer
    name: str

    @contextmanager
    def called(self) -> Iterator[Proposer]:
        """In a step, or between steps, where cancelled requests finish."""
        with blaming_in_step(f"proposer {self.name!r}"), torch.inference_mode():
            yield self.proposer

    def close(self) -> None:
        """If it can be closed: `close` is younger than the plugin API."""
        method = getattr(self.proposer, "close", None)
        try:
            with torch.inference_mode():
                if callable(method):
                    method()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"proposer {self.name!r} failed to close: {type(error).__name__}: {error}. What it was to keep may be "
                f"lost; report this to the plugin's author"
            ) from error
