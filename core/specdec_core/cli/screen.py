"""Text of others, as a terminal may have it: names, versions of distributions, what other libraries say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str) -> str:
    """With escapes such as \\x1b for whatever a terminal would obey or not show. Ends of lines and tabs stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def cell(text: str) -> Text:
    """For a table of rich. Brackets in it are no markup."""
    from rich.text import Text

    return Text(printable(text))
