"""Drafting a chain: what most often followed the longest context, or a shorter one if it promises more."""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.compiled import inlined
from specdec_proposer_suffix.store import BEST_COUNT, BEST_TOKEN, COUNT, LENGTH, LINK, NONE, Store, best_of

ROUNDING = np.float32(1.00001)
"""More than sums of a hundred float32 can be off by; of longer chains, one may lose to another that is no better."""


@inlined
def best_path(
    store: Store, state: int, length: int, limits: np.ndarray, most: int, least_prob: np.float32, score: np.float32
) -> tuple[np.float32, int, int]:
    """Where the chain with the highest score starts, and how many tokens it has; (score, NONE, 0) if none has more.

    A chain's score is the sum of its tokens' cumulative probabilities: how many are expected to be accepted. Contexts
    are all suffixes of the position (state, length); of equal scores the longest context wins. limits int [limit]: the
    most tokens to draft after a context of each length, of which those that share a state differ in nothing else.
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


@inlined
def _follow(store: Store, state: int, most: int, least_prob: np.float32, score: np.float32) -> tuple[np.float32, int]:
    """Score and length of the chain from a state; given up, with score 0, once it cannot exceed `score`."""
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


@inlined
def write_path(store: Store, state: int, token_ids: np.ndarray, parents: np.ndarray, scores: np.ndarray) -> None:
    """The tokens from a state, each's parent, and its probability given its parent."""
    states = store.states
    for i in range(len(token_ids)):
        target = best_of(store, state)
        token_ids[i] = states[state, BEST_TOKEN]
        parents[i] = i - 1
        scores[i] = np.float32(states[state, BEST_COUNT]) / np.float32(states[state, COUNT])
        state = target
