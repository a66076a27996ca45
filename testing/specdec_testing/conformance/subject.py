"""The proposer to check, with its options and its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen(eq=False)
class Subject:
    """A proposer by its name. modules: modules to load it from, if it is not installed. make_target(folder) and
    make_options(target's folder, folder): see `ProposerConformance`."""

    method: str
    modules: Sequence[str]
    num_speculative_tokens: int
    make_target: Callable[[Path], Path]
    make_options: Callable[[Path, Path], Mapping[str, Any]]
