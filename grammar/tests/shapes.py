"""Random schemas, patterns and grammars, in the shapes that public benchmarks of structured output have: flat and
nested records, lists, function calls, unions, optional properties, formats."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
from attrs import frozen

from specdec_core import StructuredOutputs

NAMES = ("name", "age", "city", "kind", "tags", "price", "active", "count", "created_at", "owner", "status", "address")
WORDS = ("red", "green", "small", "large", "open", "closed", "new", "used", "north", "south")
PATTERNS = (
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    r"\(\d{3}\) \d{3}-\d{4}",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"v?\d{1,2}\.\d{1,2}\.\d{1,2}(-(alpha|beta|rc)\d?)?",
    r"#[0-9a-f]{6}",
    r"[a-z]{1,10}@[a-z]{1,10}\.(com|org|net)",
    r"(GET|POST|PUT|DELETE) /[a-z]{1,8}(/[a-z0-9]{1,8}){0,2}",
    r"(true|false|null|-?\d{1,5})",
    r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,2}",
    r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?",
)
SUM = 'start: number (("+" | "-") number)~1..4\nnumber: /[0-9]{1,4}/'
PAIRS = 'start: pair ("," pair)~0..3\npair: /[a-z]{2,6}/ "=" /[0-9]{1,3}/'
QUERY = """
start: "SELECT " field " FROM " name (" WHERE " name " = " value)?
field: "*" | name
name: /[a-z]{2,8}/
value: /[0-9]{1,3}/
"""
LIST = 'start: "(" item (" " item)~1..3 ")"\nitem: /[a-z]{1,5}/ | /[0-9]{1,3}/'
GRAMMARS = {
    SUM: r"\d{1,4}([+-]\d{1,4}){1,4}",
    PAIRS: r"[a-z]{2,6}=\d{1,3}(,[a-z]{2,6}=\d{1,3}){0,3}",
    QUERY: r"SELECT (\*|[a-z]{2,8}) FROM [a-z]{2,8}( WHERE [a-z]{2,8} = \d{1,3})?",
    LIST: r"\(([a-z]{1,5}|\d{1,3})( ([a-z]{1,5}|\d{1,3})){1,3}\)",
}
"""{grammar: a regular expression for the same texts}."""


@frozen
class Shape:
    """What an output has to match, and an independent check of whole outputs. pattern: a regular expression for them;
    None: they are JSON."""

    wanted: StructuredOutputs
    check: Callable[[str], None]
    pattern: str | None = None


def shapes(number: int, seed: int) -> list[Shape]:
    rng = random.Random(seed)
    return [_shape(rng) for _ in range(number)]


def _shape(rng: random.Random) -> Shape:
    kind = rng.random()
    if kind < 0.15:
        pattern = rng.choice(PATTERNS)
        return Shape(StructuredOutputs(regex=pattern), _matches(pattern), pattern)
    if kind < 0.25:
        grammar, pattern = rng.choice([*GRAMMARS.items()])
        return Shape(StructuredOutputs(grammar=grammar), _matches(pattern), pattern)
    schema = _call(rng) if kind < 0.4 else _object(rng, depth=2)
    text = json.dumps(schema)

    def check(output: str) -> None:
        jsonschema.validate(json.loads(output), schema)

    return Shape(StructuredOutputs(json=text, disable_any_whitespace=True), check)


def _matches(pattern: str) -> Callable[[str], None]:
    def check(output: str) -> None:
        assert re.fullmatch(pattern, output), (pattern, output)

    return check


def _call(rng: random.Random) -> dict[str, Any]:
    """A call of one of several functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"get_{name}"}, "arguments": _object(rng, depth=1)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in rng.sample(NAMES, rng.randint(1, 3))
    ]
    return {"anyOf": calls} if len(calls) > 1 else calls[0]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(4, 16)},
        {"type": "string", "pattern": rf"^{rng.choice(PATTERNS[:5])}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 120, 5000])},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 8},
        {"enum": rng.sample(WORDS, rng.randint(2, 5))},
        {"const": rng.choice(WORDS)},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["none", "all"]}]},
    ]
    if depth < 1 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return _object(rng, depth)
    return {"type": "array", "items": rng.choice([*simple, _object(rng, depth)]), "minItems": 1, "maxItems": 3}
