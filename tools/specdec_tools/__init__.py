"""The commands `spec-decode bench`, `demo` and `tune`, which compare speculative with plain decoding, `explain`, which
shows what happens in each step, and `new-proposer`, which writes the package of a new drafting method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_core import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def specdec_commands() -> Sequence[click.Command]:
    from specdec_tools import bench, demo, explain, new_proposer, tune

    return [bench.command, demo.command, explain.command, new_proposer.command, tune.command]
