"""The options of the method `suffix`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attrs import field, frozen

from specdec_core import ConfigError
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

    suffix_decoding_max_tree_depth: int = field(
        default=24,
        validator=whole_number(1, LONGEST),
        metadata={"help": "Most tokens of matched context and draft together."},
    )
    suffix_decoding_max_spec_factor: float = field(
        default=1.0,
        validator=number(0, MOST),
        metadata={"help": "A matched context of n tokens allows n * factor + offset draft tokens."},
    )
    suffix_decoding_max_spec_offset: float = field(
        default=0.0,
        validator=number(0, MOST),
        metadata={"help": "The offset in that formula: draft tokens allowed after a context of any length."},
    )
    suffix_decoding_min_token_prob: float = field(
        default=0.1,
        validator=number(0, 1),
        metadata={"help": "A draft ends before the cumulative probability of its tokens falls below this."},
    )
    suffix_decoding_use_tree: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Draft trees of the most probable continuations. False: draft chains."},
    )
    suffix_decoding_max_cached_requests: int = field(
        default=10000,
        validator=whole_number(0),
        metadata={
            "help": "Most outputs to keep, including those of running requests. 0: requests draft from their own "
            "tokens only."
        },
    )
    suffix_decoding_max_memory_mb: int | None = field(
        default=None,
        validator=whole_number(1, optional=True),
        metadata={
            "help": "Memory limit of the kept outputs in MiB, without the automata of running requests. None: no limit."
        },
    )
    suffix_decoding_eviction: str = field(
        default=FIFO,
        validator=one_of(FIFO, LRU),
        metadata={
            "help": "Which output to evict at the limit: 'fifo' the one that finished first, 'lru' the one that was "
            "drafted from least recently."
        },
    )
    suffix_decoding_cache_path: str | None = field(
        default=None,
        converter=_path_as_text,
        validator=text(optional=True),
        metadata={"help": "File to load outputs from and save them to. None: they are lost when the engine ends."},
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
