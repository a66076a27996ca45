"""Escapes untrusted text for the terminal, such as names of plugins or messages of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str) -> str:
    """The text with control and other unprintable characters replaced by escapes such as \\x1b. Newlines and tabs
    stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def cell(text: str) -> Text:
    """A cell of a rich table with this text, made printable. Brackets in the text are not markup."""
    from rich.text import Text

    return Text(printable(text))
