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
"""What a token may need at most: two edges for each of its suffixes, in a table with room to spare."""

LONGEST = 2**16
"""As many tokens as a request may draft in a step."""


def _path_as_text(value: Any) -> Any:
    return value.__fspath__() if hasattr(value, "__fspath__") else value


@frozen
class SuffixConfig:
    """Names, defaults and ranges are vLLM's where vLLM has the option. Raises ConfigError."""

    suffix_decoding_max_tree_depth: int = field(
        default=24,
        validator=whole_number(1, LONGEST),
        metadata={"help": "Most tokens of context and draft together: what lies further apart is not looked at."},
    )
    suffix_decoding_max_spec_factor: float = field(
        default=1.0,
        validator=number(0, MOST),
        metadata={"help": "A context of n tokens allows n * factor + offset draft tokens."},
    )
    suffix_decoding_max_spec_offset: float = field(
        default=0.0,
        validator=number(0, MOST),
        metadata={"help": "The offset of suffix_decoding_max_spec_factor: what a context of any length allows."},
    )
    suffix_decoding_min_token_prob: float = field(
        default=0.1,
        validator=number(0, 1),
        metadata={"help": "A draft ends where its path, given the context, would become less probable than this."},
    )
    suffix_decoding_use_tree: bool = field(
        default=False,
        validator=flag,
        metadata={"help": "Draft trees, of the most probable continuations on whatever branch. False: draft chains."},
    )
    suffix_decoding_max_cached_requests: int = field(
        default=10000,
        validator=whole_number(0),
        metadata={
            "help": "Outputs to remember, those of running requests included. 0: a request finds nothing but what it "
            "has itself."
        },
    )
    suffix_decoding_max_memory_mb: int | None = field(
        default=None,
        validator=whole_number(1, optional=True),
        metadata={
            "help": "Most memory for remembered outputs, in MiB; what a running request has of its own is not counted. "
            "None: no limit."
        },
    )
    suffix_decoding_eviction: str = field(
        default=FIFO,
        validator=one_of(FIFO, LRU),
        metadata={
            "help": "Which output to forget where there are too many: 'fifo' the one that finished first, 'lru' the "
            "one that was not drafted from for longest."
        },
    )
    suffix_decoding_cache_path: str | None = field(
        default=None,
        converter=_path_as_text,
        validator=text(optional=True),
        metadata={"help": "File to load outputs from, and to save them to. None: they end with the engine."},
    )

    def __attrs_post_init__(self) -> None:
        defaults = {"max_memory_mb": None, "eviction": FIFO, "cache_path": None}
        given = [key for key, value in defaults.items() if getattr(self, f"suffix_decoding_{key}") != value]
        if given and self.suffix_decoding_max_cached_requests == 0:
            raise ConfigError(
                f"suffix_decoding_max_cached_requests=0 remembers no outputs, and suffix_decoding_{given[0]} says how: "
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
            pass  # it will be made
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"suffix_decoding_cache_path={shown(path)} is no path of a file: {error}") from error
