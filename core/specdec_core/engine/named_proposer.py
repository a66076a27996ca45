"""A proposer with its name. Exceptions of the proposer become a PluginError that has this name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from attrs import evolve, frozen

from specdec_core.config.fields import shown
from specdec_core.contracts.proposer import Proposer
from specdec_core.engine.metrics import Counter, Gauge
from specdec_core.engine.plugin_errors import blaming, in_step


@frozen(eq=False)
class NamedProposer:
    proposer: Proposer
    name: str

    @contextmanager
    def called(self) -> Iterator[Proposer]:
        """A context for calls of the proposer's methods. It turns on inference mode, and turns exceptions into
        PluginError.

        In a step, inference mode is on already and not turned on again. Else an interrupt could end the two in the
        wrong order, when this context is garbage-collected, and leave inference mode on.
        """
        is_on = torch.is_inference_mode_enabled()
        with in_step(f"proposer {self.name!r}"), nullcontext() if is_on else torch.inference_mode():
            yield self.proposer

    def metrics(self) -> list[Counter | Gauge]:
        """The proposer's own metrics, with its name before theirs; none if it has no method `metrics`. Raises
        PluginError if it fails to tell them."""
        method = getattr(self.proposer, "metrics", None)
        needs = "It has to return a sequence of Counter and Gauge"
        with blaming(f"proposer {self.name!r}", "failed to tell its metrics", needs):
            found = list(method()) if callable(method) else []
            if wrong := [metric for metric in found if not isinstance(metric, Counter | Gauge)]:
                raise TypeError(f"{shown(wrong[0])} is not a metric")
            return [evolve(metric, name=f"{self.name}_{metric.name}") for metric in found]

    def forget(self) -> None:
        """Let the proposer forget earlier requests, if it has a method `forget`."""
        method = getattr(self.proposer, "forget", None)
        with blaming(f"proposer {self.name!r}", "failed to forget earlier requests"), torch.inference_mode():
            if callable(method):
                method()

    def close(self) -> None:
        """Close the proposer, if it has a method `close`. Raises PluginError if that fails."""
        method = getattr(self.proposer, "close", None)
        follows = "What it was to keep may be lost"
        with blaming(f"proposer {self.name!r}", "failed to close", follows), torch.inference_mode():
            if callable(method):
                method()
