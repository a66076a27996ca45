"""Drafting a chain. Each suffix of the context has a most frequent continuation; the one with the highest score is
drafted."""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.compiled import jit_inline
from specdec_proposer_suffix.store import BEST_COUNT, BEST_TOKEN, COUNT, LENGTH, LINK, NONE, Store, best_of

ROUNDING = np.float32(1.00001)
"""Margin for the rounding error of a float32 sum of a hundred terms. Longer chains may lose against an equal score."""


@jit_inline
def best_path(
    store: Store, state: int, length: int, limits: np.ndarray, most: int, least_prob: np.float32, score: np.float32
) -> tuple[np.float32, int, int]:
    """The chain with the highest score: (its score, the state it starts from, its number of tokens).

    A chain's score is the sum of its tokens' cumulative probabilities, the expected number of accepted tokens. All
    suffixes of the context are tried; for equal scores the longest one wins.

    state, length: the context's longest suffix in the automaton.
    limits: int64 [limit], most draft tokens after a matched context of each length.
    most: most draft tokens of the request.
    least_prob: lowest cumulative probability of a draft token.
    score: the score to exceed; without a better chain the result is (score, NONE, 0).
    """
    states = store.states
    start, num_tokens = NONE, 0
    while states[state, LINK] != NONE:
        link = states[state, LINK]
        longest = min(most, limits[states[link, LENGTH] + 1 : length + 1].max())
        found, num_found = _follow(store, state, longest, least_prob, score)
        if found > score:
            score, start, num_tokens = found, state, num_found
        state, length = link, states[link, LENGTH]
    return score, start, num_tokens


@jit_inline
def _follow(store: Store, state: int, most: int, least_prob: np.float32, score: np.float32) -> tuple[np.float32, int]:
    """Score and length of the most frequent chain from an automaton state, of up to `most` tokens; (0, 0) as soon as
    its score cannot exceed `score`."""
    states = store.states
    prob, total = np.float32(1), np.float32(0)
    for num_tokens in range(most):
        target = best_of(store, state)
        if target == NONE:
            return total, num_tokens
        prob *= np.float32(states[state, BEST_COUNT]) / np.float32(states[state, COUNT])
        if prob < least_prob:
            return total, num_tokens
        if (total + prob * np.float32(most - num_tokens)) * ROUNDING <= score:
            return np.float32(0), 0
        total += prob
        state = target
    return total, most


@jit_inline
def write_path(store: Store, state: int, token_ids: np.ndarray, parents: np.ndarray, scores: np.ndarray) -> None:
    """Fill the arrays with the most frequent chain from an automaton state: token ids, parents, and as scores each
    token's probability given its parent."""
    states = store.states
    for i in range(len(token_ids)):
        target = best_of(store, state)
        token_ids[i] = states[state, BEST_TOKEN]
        parents[i] = i - 1
        scores[i] = np.float32(states[state, BEST_COUNT]) / np.float32(states[state, COUNT])
        state = target
