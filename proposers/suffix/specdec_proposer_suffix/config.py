"""The options of the method `suffix`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import frozen

from specdec_core import ConfigError, option
from specdec_core.config.fields import flag, number, one_of, shown, text, whole_number

FIFO, LRU = "fifo", "lru"
MOST = 1e9
BYTES_PER_DEPTH = 256
"""Most bytes that one token needs per level of tree depth: two edges per suffix, in a table with free places."""

LONGEST = 2**16
"""The engine's limit of draft tokens per request and step."""


def _path_as_text(value: Any) -> Any:
    return value.__fspath__() if hasattr(value, "__fspath__") else value


@frozen
class SuffixConfig:
    """Options of the method `suffix`. Options that vLLM has too have the same names, defaults and ranges as there.

    Raises ConfigError if a value is out of range or options contradict each other.
    """

    suffix_decoding_max_tree_depth: int = option(
        whole_number(1, LONGEST), "Most tokens of matched context and draft together.", default=24
    )
    suffix_decoding_max_spec_factor: float = option(
        number(0, MOST), "A matched context of n tokens allows n * factor + offset draft tokens.", default=1.0
    )
    suffix_decoding_max_spec_offset: float = option(
        number(0, MOST), "The offset in that formula: draft tokens allowed after a context of any length.", default=0.0
    )
    suffix_decoding_min_token_prob: float = option(
        number(0, 1), "A draft ends before the cumulative probability of its tokens falls below this.", default=0.1
    )
    suffix_decoding_use_tree: bool = option(
        flag, "Draft trees of the most probable continuations. False: draft chains.", default=False
    )
    suffix_decoding_max_cached_requests: int = option(
        whole_number(0),
        "Most outputs to keep, including those of running requests. 0: requests draft from their own tokens only.",
        default=10000,
    )
    suffix_decoding_max_memory_mb: int | None = option(
        whole_number(1, optional=True),
        "Memory limit of the kept outputs in MiB, without the automata of running requests. None: no limit.",
    )
    suffix_decoding_eviction: str = option(
        one_of(FIFO, LRU),
        "Which output to evict at the limit: 'fifo' the one that finished first, 'lru' the one that was "
        "drafted from least recently.",
        default=FIFO,
    )
    suffix_decoding_cache_path: str | None = option(
        text(optional=True),
        "File to load outputs from and save them to. None: they are lost when the engine ends.",
        converter=_path_as_text,
    )

    def __attrs_post_init__(self) -> None:
        defaults = {"max_memory_mb": None, "eviction": FIFO, "cache_path": None}
        given = [key for key, value in defaults.items() if getattr(self, f"suffix_decoding_{key}") != value]
        if given and self.suffix_decoding_max_cached_requests == 0:
            raise ConfigError(
                f"suffix_decoding_max_cached_requests=0 keeps no outputs, so suffix_decoding_{given[0]} has no effect: "
                f"leave either out"
            )
        megabytes, depth = self.suffix_decoding_max_memory_mb, self.suffix_decoding_max_tree_depth
        if megabytes is not None and megabytes << 20 < depth * BYTES_PER_DEPTH:
            raise ConfigError(
                f"suffix_decoding_max_memory_mb={megabytes} is too little for suffix_decoding_max_tree_depth={depth}: "
                f"raise the one, or lower the other to {(megabytes << 20) // BYTES_PER_DEPTH}"
            )
        path = self.suffix_decoding_cache_path
        try:
            if path is not None:
                os.stat(Path(path).expanduser())
        except FileNotFoundError:
            pass  # `save_sequences` creates it
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"suffix_decoding_cache_path={shown(path)} is not a file path: {error}") from error
