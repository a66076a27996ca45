"""Target models with random weights, and their outputs without speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pytest
from attrs import frozen

from specdec_core.plugins import Plugins
from specdec_testing.conformance import beginnings, workload
from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import make_llm, quietly, run_engine
from specdec_testing.conformance.subject import Subject
from specdec_testing.conformance.workload import Ask


@frozen(eq=False)
class Target:
    """A saved target model, and its outputs without speculative decoding.

    outputs: {request: output token ids}.
    alike: {name of a group: requests that begin with the same tokens}, from `beginnings.asks`.
    """

    folder: Path
    outputs: Mapping[Ask, list[int]]
    alike: Mapping[str, Sequence[Ask]]


class Targets:
    """Saves one target model for each `make_target` function and caches its outputs. Conformance classes with the same
    function share the target and the outputs."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._factory = tmp_path_factory
        self._made: dict[Callable[[Path], Path], Target] = {}

    def of(self, subject: Subject) -> Target:
        if subject.make_target not in self._made:
            folder = subject.make_target(self._factory.mktemp("target"))
            llm, alike = make_llm(folder, quietly(Plugins.load), None), beginnings.asks()
            outputs: dict[Ask, list[int]] = {}

            def hear(asked: Sequence[Ask]) -> None:
                asked = [workload.plain(ask) for ask in asked]
                outputs.update(zip(asked, run_engine(llm, asked, Journal()).outputs, strict=True))

            hear([*workload.asks(0.0, 100, 1), *workload.asks(0.8, 200, 1), *chain(*alike.values())])
            alike["prefix"] += [beginnings.continued(ask, outputs[ask]) for ask in alike["prefix"][:1]]
            hear(alike["prefix"][-1:])
            self._made[subject.make_target] = Target(folder, outputs, alike)
        return self._made[subject.make_target]
