"""`ProposerConformance`, the class that plugin authors subclass to test a proposer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specdec_testing.conformance.base import Conformance
from specdec_testing.conformance.chance import ChanceChecks
from specdec_testing.conformance.drafts import DraftChecks
from specdec_testing.conformance.lifecycle import LifecycleChecks
from specdec_testing.conformance.observations import ObservationChecks
from specdec_testing.conformance.output import OutputChecks
from specdec_testing.conformance.spec import SpecChecks
from specdec_testing.conformance.subject import Subject
from specdec_testing.tiny import tiny_target


class ProposerConformance(
    SpecChecks,
    DraftChecks,
    ChanceChecks,
    LifecycleChecks,
    ObservationChecks,
    OutputChecks,
    Conformance,
    is_kit=True,
):
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
    num_speculative_tokens: ClassVar[int] = 5

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
