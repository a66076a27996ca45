"""Describes the proposer that a conformance class checks: its method, options and target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen(eq=False)
class Subject:
    """The proposer to check.

    method: its name in speculative_config.
    modules: modules to load its plugin from, if the plugin is not installed.
    make_target: function that saves a target model in the given folder and returns the model's folder.
    make_options: function that takes the target's folder and an empty folder for files, and returns the method's own
        keys of speculative_config.
    """

    method: str
    modules: Sequence[str]
    num_speculative_tokens: int
    make_target: Callable[[Path], Path]
    make_options: Callable[[Path, Path], Mapping[str, Any]]
