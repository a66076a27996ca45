"""Prompt lookup decoding (Saxena 2023): find the context's own ending earlier in the context, draft what followed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import TYPE_CHECKING

from numba import njit, types

from specdec_core import Draft, Proposer, ProposerBatch
from specdec_proposer_ngram.config import NgramConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    Find = Callable[[np.ndarray, int, int, bool], int]


def compiled(find: Find) -> Find:
    tokens = types.Array(types.int64, 1, "C", readonly=True)  # a writable array is accepted too
    signature = types.int64(tokens, types.int64, types.int64, types.boolean)
    try:
        kernel: Find = njit(signature, nogil=True, cache=True)(find)
    except RuntimeError:  # numba found no folder that it may write its cache to
        kernel = njit(signature, nogil=True)(find)
    return kernel


@compiled
def find_continuation(tokens: np.ndarray, shortest: int, longest: int, most_recent: bool) -> int:
    """Where the text went on after an earlier occurrence of its last n tokens: an index into tokens, 0 for nowhere.

    n is the largest in [shortest, longest] that occurs earlier, overlap with the ending itself allowed; of several
    occurrences the most recent one counts, or the leftmost. One scan over tokens (int64 [num_tokens]), in which most
    positions cost one comparison and none more than `longest`.
    """
    num_tokens = len(tokens)
    start, start_length = 0, shortest - 1
    for i in range(1, num_tokens):
        end = num_tokens - i if most_recent else i
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[num_tokens - 1 - length]:
            length += 1
        if length > start_length:
            start, start_length = end, length
            if length == longest:
                break
    return start


class NgramProposer(Proposer):
    """Chains copied from the request's own tokens. It keeps no state, so `propose` is all there is."""

    def __init__(self, config: NgramConfig, device: torch.device) -> None:
        self._shortest, self._longest = config.lengths
        self._most_recent = config.prompt_lookup_match == "last"
        self._device = device

    def propose(self, batch: ProposerBatch) -> Draft:
        chains = [
            self._chain(request.token_ids, budget)
            for request, budget in zip(batch.requests, batch.max_draft_tokens, strict=True)
        ]
        return Draft.from_chains(chains, self._device)

    def _chain(self, tokens: np.ndarray, budget: int) -> list[int]:
        start = find_continuation(tokens, self._shortest, self._longest, self._most_recent)
        if start == 0:
            return []
        continuation: list[int] = tokens[start : start + budget].tolist()
        # One cut short by the end of the context is a whole period of a text that repeats itself: so it goes round.
        return list(islice(cycle(continuation), budget))
