"""Measures how much memory a suffix proposer takes to cache outputs, in bytes per cached token.

proposers.py runs it in a separate process, as `proposer_memory.py NUM_CACHED NUM_TOKENS specdec|arctic`. The proposer
caches NUM_CACHED outputs of NUM_TOKENS tokens. The script prints a JSON object: "rss" is the growth of the process's
RSS (resident set size), "own" the growth of the size that the proposer itself reports, both per cached token. "own" is
left out if the proposer reports no size.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import proposer_settings
from streams import Replay, documents


def resident_bytes() -> int:
    """Return freed heap memory to the OS, then return this process's RSS (resident set size) in bytes."""
    gc.collect()
    with suppress(AttributeError, OSError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    num_cached, num_tokens, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    texts = documents(num_cached, num_tokens)
    warm = proposer_settings.SUFFIX[name]()  # compile and allocate everything that happens only once
    warm.cache(Replay("warm", texts[0][:500].copy(), 1))
    peer = proposer_settings.SUFFIX[name]()
    peer.cache(Replay("first", texts[0][:500].copy(), 1))
    own, before = peer.cached_bytes(), resident_bytes()
    for i, text in enumerate(texts):
        peer.cache(Replay(f"cached-{i}", text, 1))
    num_cached_tokens = num_cached * (num_tokens - 1)
    after = peer.cached_bytes()
    answer = {"rss": (resident_bytes() - before) / num_cached_tokens}
    if own is not None and after is not None:
        answer["own"] = (after - own) / num_cached_tokens
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
