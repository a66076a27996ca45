"""The command `spec-decode serve`: an OpenAI-compatible HTTP server.

specdec_core imports this module whenever it lists plugins, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_core import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def specdec_commands() -> Sequence[click.Command]:
    from specdec_server.cli import serve

    return [serve]
