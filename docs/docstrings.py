"""Shows fields and parameters in docstrings as lists on the docs site: lines such as `model: a folder or a name`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)


class FieldLists(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """Make each line that begins with names and a colon an item of a list, with a blank line before the first."""
    lines: list[str] = []
    for line in text.splitlines():
        before, item = lines[-1] if lines else "", ENTRY.sub(r"- `\g<names>`: ", line)
        is_in_list, was_in_list = item != line or line.startswith(" "), before.startswith(("- ", " "))
        if line and before and is_in_list != was_in_list:
            lines.append("")
        lines.append(item)
    return "\n".join(lines)
