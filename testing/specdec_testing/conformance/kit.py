"""`ProposerConformance`, the class that plugin authors subclass to test a proposer. A subclass that overrides one of
its tests raises PluginError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specdec_core.errors import PluginError
from specdec_testing.conformance.chance import ChanceChecks
from specdec_testing.conformance.drafts import DraftChecks
from specdec_testing.conformance.lifecycle import LifecycleChecks
from specdec_testing.conformance.observations import ObservationChecks
from specdec_testing.conformance.output import OutputChecks
from specdec_testing.conformance.spec import SpecChecks
from specdec_testing.conformance.subject import Subject
from specdec_testing.tiny import tiny_target


class ProposerConformance(SpecChecks, DraftChecks, ChanceChecks, LifecycleChecks, ObservationChecks, OutputChecks):
    """Tests that a proposer keeps the contracts in `specdec_core.contracts`, with one test for each rule.

    method: the method's name, as in speculative_config.
    options: the method's own keys of speculative_config.
    modules: modules to load the plugin from, if it is not installed.
    num_speculative_tokens: the largest number of draft tokens per request and decode step.
    skips: {name of a test: why it does not apply to this proposer}. Defining a subclass that overrides a test raises
        PluginError.
    learns: whether the number of draft tokens may depend on how many of the request's earlier draft tokens were
        accepted.

    The proposer runs in the real engine with a target model of random weights. Override `make_options` if the proposer
    needs a draft checkpoint that fits the target.
    """

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    modules: ClassVar[Sequence[str]] = ()
    num_speculative_tokens: ClassVar[int] = 5
    skips: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def make_target(folder: Path) -> Path:
        """Save a target model in `folder` and return the folder. The model must have at least 48 token ids, a maximum
        length of at least 512 tokens, and no end-of-text token."""
        return tiny_target(folder)

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        """Return the method's own keys of speculative_config.

        target: the folder of the target model.
        folder: an empty folder for files that the options name, such as a draft checkpoint.
        """
        return cls.options

    @classmethod
    def subject(cls, config: pytest.Config) -> Subject:
        """Return the proposer to check, with its options and its target. config: pytest's configuration object, from
        which subclasses can read command-line options."""
        return Subject(cls.method, cls.modules, cls.num_speculative_tokens, cls.make_target, cls.make_options)

    @classmethod
    def reasons_to_skip(cls, config: pytest.Config) -> Mapping[str, str]:
        """Return the tests to skip, {name of a test: why it does not apply to this proposer}. config: pytest's
        configuration object, from which subclasses can read command-line options."""
        return cls.skips

    def __init_subclass__(cls) -> None:
        tests = kit_tests()
        changed = [name for name in tests if getattr(cls, name) is not getattr(ProposerConformance, name)]
        if changed:
            raise PluginError(
                f"{cls.__name__} overrides {', '.join(changed)} of the conformance kit: name it in `skips` with the "
                f"reason why it does not apply, and add tests of your own under other names"
            )
        check_skips(cls.skips, cls.__name__)


def kit_tests() -> list[str]:
    return [name for name in dir(ProposerConformance) if name.startswith("test_")]


def check_skips(skips: Mapping[str, str], where: str) -> None:
    """Raise PluginError if `skips` names an unknown test or has an empty reason.

    skips: {name of a test: why it does not apply to the proposer}.
    where: the class or command-line option that the error message names as the source of `skips`.
    """
    for name, reason in skips.items():
        if name not in kit_tests():
            raise PluginError(f"{where} skips {name!r}, which is no kit test: the kit has {', '.join(kit_tests())}")
        if not isinstance(reason, str) or not reason.strip():
            raise PluginError(f"{where} skips {name!r} without a reason: say why it does not apply to this proposer")
