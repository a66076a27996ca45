"""Drafting a chain. The automaton gives the most frequent continuation of each suffix of a request's tokens, and the
continuation with the highest score is drafted."""

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
    """Find the chain with the highest score. Returns its score, the automaton state from which it starts, and its
    number of tokens.

    A chain's score is the sum of its tokens' cumulative probabilities, the expected number of accepted tokens. All
    suffixes of the request's tokens are tried; of chains with equal scores, the one after the longest suffix wins.

    state, length: state and number of tokens of the longest suffix that occurs in the automaton.
    limits: int64 [tree depth], limits[n] is the largest number of draft tokens after a suffix of n tokens.
    most: largest number of draft tokens of the request.
    least_prob: lowest cumulative probability of a draft token.
    score: the score to exceed. If no chain does, the result is (score, NONE, 0).
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
    """Follow the most frequent next tokens from an automaton state, up to `most` tokens. Returns the score and the
    number of tokens of this chain, or (0, 0) as soon as it is clear that the score cannot exceed `score`."""
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
    """Fill the arrays with the most frequent chain from an automaton state. The score of a token is its probability
    given its parent."""
    states = store.states
    for i in range(len(token_ids)):
        target = best_of(store, state)
        token_ids[i] = states[state, BEST_TOKEN]
        parents[i] = i - 1
        scores[i] = np.float32(states[state, BEST_COUNT]) / np.float32(states[state, COUNT])
        state = target
