"""Config files: the keywords of `LLM` in TOML, YAML or JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from specdec_core.config.engine import EngineConfig
from specdec_core.config.fields import refuse_unknown, shown
from specdec_core.config.options import Option, options_of
from specdec_core.config.yaml_values import load_yaml, loader
from specdec_core.errors import ConfigError

OPTIONS = (
    *options_of(EngineConfig),
    Option("tokenizer", "a folder or a name, or None", "None", "Another tokenizer than the model's."),
    Option("skip_tokenizer_init", "True or False", "False", "Load no tokenizer: prompts and outputs are token ids."),
    Option("speculative_config", "a table, or None", "None", "How to speculate. None: plain decoding."),
)
"""The keys of a config file: the keywords of `LLM`, except `plugins`, which is an object."""

KEYS = frozenset(option.name for option in OPTIONS)

MOST_VALUES = 100_000
"""Limit for a YAML file, since aliases let a few lines stand for billions of values."""


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Read the keywords of `LLM` from a file: `LLM(**load_config_file("served.toml"))`.

    The suffix determines the format: .toml, .yaml, .yml or .json. The key `speculative_config` has a mapping (in TOML,
    a table) with the name of a proposer as `method`, and its options. `LLM` checks the values. A relative folder in
    `model` or `tokenizer` is relative to the working directory, as on the command line and in Python, not to the file.

    Raises ConfigError, which names the file, and the line if the parser reports it.
    """
    path = Path(path)
    name, suffix = f"config file {str(path)!r}", path.suffix.lower()
    if suffix not in _PARSERS and path.exists():
        raise ConfigError(f"{name} has no known suffix: allowed are {', '.join(sorted(_PARSERS))}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: byte {error.start}. Save it as UTF-8") from error
    try:
        found = _PARSERS[suffix](text)
    except Exception as error:  # a broken file may raise anything
        said = " ".join(str(error).replace('in "<unicode string>", ', "at ").split()) or type(error).__name__
        raise ConfigError(f"{name} cannot be read as {path.suffix[1:].upper()}: {said}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds {shown(found, 40)}: give keys with values, such as model")
    refuse_unknown(found, KEYS, name)
    speculation = found.get("speculative_config")
    if speculation is not None and not (isinstance(speculation, Mapping) and speculation):
        raise ConfigError(
            f"{name} has speculative_config={shown(speculation, 40)}: give a table with method, "
            f"num_speculative_tokens and the method's own keys, or leave it out"
        )
    return found


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {shown(key)} is given twice: keep one")
        found[key] = value
    return found


def _yaml(text: str) -> Any:
    import yaml

    sizes: dict[int, int] = {}

    def num_values(node: Any) -> int:
        """The number of values in a YAML node. Values behind an alias are counted each time the alias is used."""
        if id(node) not in sizes:
            sizes[id(node)] = 1  # for a node that holds itself
            if isinstance(node, yaml.MappingNode):
                _refuse_repeated(key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
                sizes[id(node)] += sum(map(num_values, chain.from_iterable(node.value)))
            elif isinstance(node, yaml.SequenceNode):
                sizes[id(node)] += sum(map(num_values, node.value))
        return sizes[id(node)]

    if num_values(yaml.compose(text, loader())) > MOST_VALUES:
        raise ValueError(
            f"it holds more than {MOST_VALUES} values, those behind aliases counted each time: write fewer"
        )
    return load_yaml(text)


def _refuse_repeated(key_nodes: Iterable[Any]) -> None:
    lines: dict[str, int] = {}
    for node in key_nodes:
        key, line = str(node.value), node.start_mark.line + 1
        if key in lines:
            raise ValueError(f"key {shown(key)} in line {line} was in line {lines[key]} already: keep one")
        lines[key] = line


_PARSERS: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
