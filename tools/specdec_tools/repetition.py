"""Measures of repetition. Small models loop under greedy decoding, and every proposer predicts a loop well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64
MIN_COPIED = 16
NGRAM = 4


def loop_start(token_ids: Sequence[int]) -> int:
    """Return the index at which a token sequence begins to loop; the sequence's length if it never does.

    A loop is a segment of at most MAX_PERIOD tokens, followed by copies of the segment: at least one whole copy, and at
    least MIN_COPIED copied tokens. The returned index is that of the first copied token. Three equal brackets or short
    lines are not a loop. The sequence may go on without repetition after the loop.

    In human-written Python outside the embedded model's training data, 3 of 839 pieces of 256 tokens have a loop. With
    MIN_COPIED = 12 instead of 16, 5 pieces would have one; with 8, 10 pieces.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    starts = (_copies_from(tokens, period) for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1))
    return min((start for start in starts if start is not None), default=len(tokens))


def _copies_from(tokens: np.ndarray, period: int) -> int | None:
    """Return the start of the first long run of tokens that each equal the token `period` positions before.

    A run is long if it has at least max(period, MIN_COPIED) tokens. None: there is no such run.
    """
    is_copy = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
    begins, ends = np.flatnonzero(is_copy[1:] != is_copy[:-1]).reshape(-1, 2).T
    long_enough = begins[ends - begins >= max(period, MIN_COPIED)]
    return int(long_enough[0]) + period if len(long_enough) else None


def ngram_counts(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the number of distinct n-grams in a token sequence, and the number of all its n-grams. n is NGRAM."""
    ngrams = list(zip(*(token_ids[i:] for i in range(NGRAM)), strict=False))
    return len(set(ngrams)), len(ngrams)
