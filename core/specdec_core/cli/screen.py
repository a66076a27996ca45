"""Prints tables, and escapes untrusted text in them, such as names of plugins or messages of other libraries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDE = 10_000
"""Columns, more than any table needs."""


def make_console() -> Console:
    """A rich console that breaks lines at the terminal's width. In a file or a pipe it breaks none, unless COLUMNS is
    set."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = WIDE
    return console


def counted(number: int, noun: str) -> str:
    """A number and a noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """The text with control and other unprintable characters replaced by escapes such as \\x1b. Newlines and tabs
    stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def cell(text: str) -> Text:
    """A cell of a rich table with this text, made printable. Brackets in the text are not markup."""
    from rich.text import Text

    return Text(printable(text))
