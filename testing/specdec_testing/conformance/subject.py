"""The proposer to check, with its options and its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen(eq=False)
class Subject:
    """The proposer to check, named by its method.

    modules: modules to load it from, if its plugin is not installed.
    make_target: (folder) -> the folder with a target model that was saved there.
    make_options: (the target's folder, an empty folder for files) -> the method's options.
    """

    method: str
    modules: Sequence[str]
    num_speculative_tokens: int
    make_target: Callable[[Path], Path]
    make_options: Callable[[Path, Path], Mapping[str, Any]]
