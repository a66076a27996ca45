"""What the kit's command-line options of pytest say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from specdec_core.errors import PluginError
from specdec_testing.conformance.base import Conformance, NamedSubject


def options_of(config: pytest.Config) -> dict[str, Any]:
    """Return the plugin's options, from --specdec-option KEY=VALUE. Values are read as YAML."""
    return {key: yaml.safe_load(value) for key, value in _pairs(config, "--specdec-option").items()}


def subject_of(config: pytest.Config, option: str) -> NamedSubject:
    """Return the plugin to check, whose name `option` has."""
    return NamedSubject(config.getoption(option), config.getoption("--specdec-module"), options_of(config))


def skips_of(cls: type[Conformance], config: pytest.Config) -> Mapping[str, str]:
    """Return the tests of a kit class to skip, from --specdec-skip TEST=REASON."""
    skips = _pairs(config, "--specdec-skip")
    cls.check_skips(skips, "--specdec-skip")
    return skips


def _pairs(config: pytest.Config, option: str) -> dict[str, str]:
    given: Sequence[str] = config.getoption(option)
    pairs = [text.partition("=") for text in given]
    for text, (key, equals, _) in zip(given, pairs, strict=True):
        if not key or not equals:
            raise PluginError(f"{option} {text!r} has no '=': write it like {option} name=value")
    return {key: value for key, _, value in pairs}
