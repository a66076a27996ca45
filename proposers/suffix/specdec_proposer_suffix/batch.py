"""Compiled functions for a whole batch: they append the requests' new tokens to suffix automata, then draft."""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.automaton import NUM_TOKENS, STATE, extend, match, state_of_length
from specdec_proposer_suffix.compiled import jit, jit_inline
from specdec_proposer_suffix.paths import best_path, write_path
from specdec_proposer_suffix.store import NONE, ROOT, Store, last_seen_in
from specdec_proposer_suffix.trees import best_tree

# Columns of the request table, int64 [max_num_seqs, REQUEST_WIDTH]
OWN = slice(0, 2)  # the request's position in the automaton of its own tokens
CACHED = slice(2, 4)  # its output's position in the automaton of all outputs; its state is NONE if it is not in there
NUM_PROMPT = 4  # number of prompt tokens
OWNER = 5  # the id of its output in the cache
OWN_ROOT = 6  # the root of the automaton of its own tokens
REQUEST_WIDTH = 7

# Rows of a step's plan, int64 [4, batch]
SLOTS = 0  # the request's row in the request table
TOTALS = 1  # number of tokens of the request
ENDS = 2  # end of the request's tokens in `tails`, which has all new tokens and at least as many as a context has
BUDGETS = 3  # most draft tokens

# Rows that the step writes over the plan
COUNTS = 0  # number of nodes in the draft
DEPTHS = 1  # depth of the deepest node
SOURCES = 2  # id of the output that the draft was copied from; NONE if it is the request's own text

UNRECORDED = -2
"""In SOURCES: the draft was copied from an output, and the store does not record which one."""

DONE, OWN_IS_FULL, CACHE_IS_FULL = range(3)
"""Result of a step: done, or the store that must be enlarged before the same step is run again."""


@jit
def draft_chains(
    own_states: np.ndarray,
    own_edges: np.ndarray,
    own_book: np.ndarray,
    states: np.ndarray,
    edges: np.ndarray,
    book: np.ndarray,
    vocab_size: int,
    requests: np.ndarray,
    plan: np.ndarray,
    tails: np.ndarray,
    limits: np.ndarray,
    least_prob: float,
    token_ids: np.ndarray,
    parents: np.ndarray,
    scores: np.ndarray,
) -> int:
    """Append new tokens to the suffix automata, then write one draft chain per request into the arrays, one after the
    other.

    For each request, one chain is found in the request's own automaton and another one in the automaton of all outputs.
    The chain with the higher score is drafted. If the scores are equal, the chain from the request's own automaton is
    drafted.

    own_states, own_edges, own_book: the store of the requests' own automata. The arrays of a store are separate
        arguments because numba unpacks these several times as fast as tuples.
    states, edges, book: the store of the automaton of all outputs.
    requests: int64 [max_num_seqs, REQUEST_WIDTH], a row for each request. The constants at the top of the file explain
        its columns.
    plan: int64 [4, batch]. The constants at the top of the file explain its rows. The first three are overwritten with
        results.
    tails: the last tokens of each request, one request after the other. They include all new tokens.
    limits: int64 [tree depth], limits[n] is the largest number of draft tokens after a match of n tokens.
    least_prob: lowest cumulative probability of a draft token.
    token_ids, parents, scores: overwritten with the drafts, [sum of budgets] each.

    Returns DONE or, if a store must be enlarged first, OWN_IS_FULL or CACHE_IS_FULL.
    """
    own, cache = Store(own_states, own_edges, own_book), Store(states, edges, book)
    full = take_over(own, cache, len(limits), vocab_size, requests, plan, tails)
    if full != DONE:
        return full
    limit, least, end, start = len(limits), np.float32(least_prob), 0, 0
    for i in range(plan.shape[1]):
        request, budget, begin = requests[plan[SLOTS, i]], plan[BUDGETS, i], end
        state, length = own_context(own, request, limit)
        score, first, count = best_path(own, state, length, limits, budget, least, np.float32(0))
        state, length = cached_context(cache, request, limit, tails[start : plan[ENDS, i]])
        _, better, num_better = best_path(cache, state, length, limits, budget, least, score)
        start, source = plan[ENDS, i], NONE
        if better != NONE:
            end, source = begin + num_better, source_of(cache, better)
            write_path(cache, better, token_ids[begin:end], parents[begin:end], scores[begin:end])
        else:
            end = begin + count
            write_path(own, first, token_ids[begin:end], parents[begin:end], scores[begin:end])
        plan[COUNTS, i], plan[DEPTHS, i], plan[SOURCES, i] = end - begin, end - begin, source
    return DONE


@jit
def draft_trees(
    store: Store,
    is_cache: bool,
    requests: np.ndarray,
    plan: np.ndarray,
    tails: np.ndarray,
    limits: np.ndarray,
    least_prob: float,
    token_ids: np.ndarray,
    parents: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Write one draft tree per request into the arrays, one after the other.

    store: the store of the suffix automata to draft from.
    is_cache: whether the store holds the automaton of all outputs, and not the requests' own automata.

    The other arguments are those of `draft_chains`.
    """
    end, start = 0, 0
    for i in range(plan.shape[1]):
        request, budget, tail = requests[plan[SLOTS, i]], plan[BUDGETS, i], tails[start : plan[ENDS, i]]
        if is_cache:
            state, length = cached_context(store, request, len(limits), tail)
        else:
            state, length = own_context(store, request, len(limits))
        begin, end = end, end + budget
        count, depth, first = best_tree(
            store, state, length, limits, budget, np.float32(least_prob),
            token_ids[begin:end], parents[begin:end], scores[begin:end],
        )  # fmt: skip
        end, start = begin + count, plan[ENDS, i]
        plan[COUNTS, i], plan[DEPTHS, i], plan[SOURCES, i] = count, depth, NONE
        if is_cache and first != NONE:
            plan[SOURCES, i] = source_of(store, first)


@jit_inline
def source_of(cache: Store, state: int) -> int:
    """Return the id of the output in which a string of this state occurred last, or UNRECORDED."""
    source = last_seen_in(cache, state)
    return UNRECORDED if source == NONE else source


@jit_inline
def take_over(
    own: Store,
    cache: Store,
    limit: int,
    vocab_size: int,
    requests: np.ndarray,
    plan: np.ndarray,
    tails: np.ndarray,
) -> int:
    """Append each request's new tokens to its own suffix automaton, and its new output tokens to the automaton of all
    outputs. Returns DONE or, if a store must be enlarged first, OWN_IS_FULL or CACHE_IS_FULL."""
    if not _take_over(own, limit, vocab_size, requests, OWN.start, plan, tails):
        return OWN_IS_FULL
    if not _take_over(cache, limit, vocab_size, requests, CACHED.start, plan, tails):
        return CACHE_IS_FULL
    return DONE


@jit
def _take_over(
    store: Store, limit: int, vocab_size: int, requests: np.ndarray, column: int, plan: np.ndarray, tails: np.ndarray
) -> bool:
    """Append the requests' new tokens to the automata in one store. Returns False if the store became full.

    column: the first of the two columns of `requests` that hold the requests' positions in these automata.
    """
    for i in range(plan.shape[1]):
        request, end = requests[plan[SLOTS, i]], plan[ENDS, i]
        position = request[column : column + 2]
        num_tokens = plan[TOTALS, i] - (0 if column == OWN.start else request[NUM_PROMPT])
        if num_tokens <= position[NUM_TOKENS] or position[STATE] == NONE:
            continue
        new = tails[end - num_tokens + position[NUM_TOKENS] : end]
        if not extend(store, limit, vocab_size, position, new, request[OWNER]):
            return False
    return True


@jit_inline
def own_context(store: Store, request: np.ndarray, limit: int) -> tuple[int, int]:
    """Return the state of the request's last tokens in its own automaton, and the number of these tokens. The request's
    draft continues these tokens."""
    length = min(request[OWN][NUM_TOKENS], limit - 1)
    return state_of_length(store, request[OWN][STATE], length), length


@jit_inline
def cached_context(store: Store, request: np.ndarray, limit: int, tail: np.ndarray) -> tuple[int, int]:
    """Return the longest suffix of the request's tokens that occurs in the automaton of all outputs: its state and its
    number of tokens. The request's draft continues this suffix.

    If the request's output has at least limit - 1 tokens, its stored position gives the state. Otherwise the suffix may
    include prompt tokens, and `match` finds the state.

    tail: the request's last tokens.
    """
    if request[CACHED][STATE] != NONE and request[CACHED][NUM_TOKENS] >= limit - 1:
        return state_of_length(store, request[CACHED][STATE], limit - 1), limit - 1
    return match(store, ROOT, limit, tail[len(tail) - min(len(tail), limit - 1) :])
