"""specdec-train: the command `spec-decode train METHOD`, for every installed method that has a training recipe.

specdec_core imports this module whenever it lists plugins, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["specdec_commands"]


@hookimpl
def specdec_commands() -> Sequence[click.Command]:
    from specdec_train.commands import train

    return [train]
