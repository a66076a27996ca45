"""Reads YAML with the values of YAML 1.2: 1e-3 is a number, 010 is ten, and yes, off and 1:40 are text.

PyYAML alone follows YAML 1.1, where 1e-3 is text, 010 is eight, off is False and 1:40 is a hundred.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, ClassVar

VALUES = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""By type: what such a value looks like, and its first characters (YAML 1.2.2, section 10.3.2)."""


def load_yaml(text: str) -> Any:
    """Parse a YAML document into plain Python values. Raises yaml.YAMLError, or ValueError for a value that no type
    can hold."""
    import yaml

    return yaml.load(text, loader())


@cache
def loader() -> Any:
    """Return PyYAML's safe loader, with the values of YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    for kind, (pattern, first) in VALUES.items():
        firsts = [*first, ""] if kind == "null" else list(first)
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})$"), firsts)

    def whole(loader: Any, node: Any) -> int:
        return int(node.value, 0 if node.value[1:2] in ("o", "x") else 10)

    Loader.add_constructor("tag:yaml.org,2002:int", whole)
    return Loader
