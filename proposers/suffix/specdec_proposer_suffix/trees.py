"""Drafting a tree: the most probable continuations of a request's last tokens, in several branches."""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.compiled import jit
from specdec_proposer_suffix.store import (
    BEST_TARGET,
    BEST_TOKEN,
    COUNT,
    FIRST_EDGE,
    LENGTH,
    LINK,
    NEXT,
    NONE,
    TARGET,
    TOKEN,
    Store,
)


@jit
def best_tree(
    store: Store,
    state: int,
    length: int,
    limits: np.ndarray,
    most: int,
    least_prob: np.float32,
    token_ids: np.ndarray,
    parents: np.ndarray,
    scores: np.ndarray,
) -> tuple[int, int, int]:
    """Write the draft tree with the highest score into the arrays. A tree's score is the sum of its nodes' cumulative
    probabilities.

    Returns the tree's number of nodes, its depth, and the automaton state from which it starts. This state is NONE for
    an empty tree. The arguments up to `least_prob` are those of `paths.best_path`.

    token_ids, parents, scores: overwritten with the tree, [most] each. A score is a node's probability given its
        parent.
    """
    states = store.states
    score, num_nodes, max_depth, chosen = np.float32(0), 0, 0, NONE
    kept = np.empty(most, np.int64), np.empty(most, np.int32), np.empty(most, np.float32)
    while states[state, LINK] != NONE:
        link = states[state, LINK]
        first = states[link, LENGTH] + 1
        context = first + limits[first : length + 1].argmax()
        room = min(most, limits[context])
        if np.float32(room) > score:
            depth = len(limits) - context
            found, num_found, deepest = _grow(store, state, depth, room, least_prob, kept[0], kept[1], kept[2])
            if found > score:
                score, num_nodes, max_depth, chosen = found, num_found, deepest, state
                for i in range(num_nodes):
                    token_ids[i], parents[i], scores[i] = kept[0][i], kept[1][i], kept[2][i]
        state, length = link, states[link, LENGTH]
    return num_nodes, max_depth, chosen


@jit
def _grow(
    store: Store,
    state: int,
    depth: int,
    most: int,
    least_prob: np.float32,
    token_ids: np.ndarray,
    parents: np.ndarray,
    scores: np.ndarray,
) -> tuple[np.float32, int, int]:
    """Write a draft tree that starts from an automaton state, with up to `most` nodes and `depth` levels. The most
    probable nodes are added first. Returns the tree's score, number of nodes and depth. The other arguments are those
    of `best_tree`."""
    states, edges = store.states, store.edges
    probs = np.empty((most, 2), np.float32)  # of waiting nodes: cumulative, and given the parent
    nodes = np.empty((most, 4), np.int64)  # their tokens, states, parents and depths
    num_waiting, num_nodes, total, deepest = 0, 0, np.float32(0), 0
    parent, level, prob = NONE, 1, np.float32(1)
    while True:
        edge = states[state, FIRST_EDGE]
        token, target = states[state, BEST_TOKEN], states[state, BEST_TARGET]
        while level <= depth and (edge != NONE or token >= 0):
            if edge != NONE:
                token, target, edge = edges[edge, TOKEN], edges[edge, TARGET], edges[edge, NEXT]
            own = np.float32(states[target, COUNT]) / np.float32(states[state, COUNT])
            # The least probable node is replaced when there are more than can be added.
            place = num_waiting if num_waiting < most else probs[:, 0].argmin()
            if prob * own >= least_prob and (num_waiting < most or prob * own > probs[place, 0]):
                probs[place, 0], probs[place, 1] = prob * own, own
                nodes[place, 0], nodes[place, 1], nodes[place, 2], nodes[place, 3] = token, target, parent, level
                num_waiting = max(num_waiting, place + 1)
            if edge == NONE:
                break
        if num_waiting == 0 or num_nodes == most:
            return total, num_nodes, deepest
        best = probs[:num_waiting, 0].argmax()
        prob, state, parent, level = probs[best, 0], nodes[best, 1], num_nodes, nodes[best, 3] + 1
        token_ids[num_nodes], parents[num_nodes], scores[num_nodes] = nodes[best, 0], nodes[best, 2], probs[best, 1]
        num_nodes, num_waiting, total, deepest = num_nodes + 1, num_waiting - 1, total + prob, max(deepest, level - 1)
        probs[best], nodes[best] = probs[num_waiting], nodes[num_waiting]
