"""What one step does for a whole batch: take over new tokens, then draft."""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.automaton import NUM_TOKENS, STATE, extend, match, settled
from specdec_proposer_suffix.compiled import compiled, inlined
from specdec_proposer_suffix.paths import best_path, write_path
from specdec_proposer_suffix.store import NONE, ROOT, Store, last_seen_in
from specdec_proposer_suffix.trees import best_tree

# Columns of what is known of each request, int64 [max_num_seqs, REQUEST_WIDTH]
OWN = slice(0, 2)  # its position in the automaton of its own tokens
CACHED = slice(2, 4)  # its output's in that of all outputs; the state is NONE if it is not in there
NUM_PROMPT = 4  # tokens
OWNER = 5  # its output's number
OWN_ROOT = 6
REQUEST_WIDTH = 7

# Rows of a step's plan, int64 [4, batch]
SLOTS = 0  # the request's row above
TOTALS = 1  # how many tokens it has by now
ENDS = 2  # where its last ones end in `tails`, which has all new ones, and as many as a context may have
BUDGETS = 3

# What the step leaves there
COUNTS = 0  # nodes of its draft
DEPTHS = 1  # of the deepest
SOURCES = 2  # number of the output that the draft is from; NONE: of none, or that is not recorded

DONE, OWN_IS_FULL, CACHE_IS_FULL = range(3)
"""Whether a step is done, or which store must have more room before the same step is done again."""


@compiled
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
    """Take over new tokens and write a chain for each request, one after the other: from its own automaton, unless that
    of all outputs promises more. Both stores come in parts, which numba unpacks several times as fast as tuples."""
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
            end, source = begin + num_better, last_seen_in(cache, better)
            write_path(cache, better, token_ids[begin:end], parents[begin:end], scores[begin:end])
        else:
            end = begin + count
            write_path(own, first, token_ids[begin:end], parents[begin:end], scores[begin:end])
        plan[COUNTS, i], plan[DEPTHS, i], plan[SOURCES, i] = end - begin, end - begin, source
    return DONE


@compiled
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
    """Write a tree for each request, one after the other, from one store or the other."""
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
            plan[SOURCES, i] = last_seen_in(store, first)


@inlined
def take_over(
    own: Store,
    cache: Store,
    limit: int,
    vocab_size: int,
    requests: np.ndarray,
    plan: np.ndarray,
    tails: np.ndarray,
) -> int:
    """Append each request's new tokens to its own automaton, and those of its output to that of all outputs."""
    if not _take_over(own, limit, vocab_size, requests, OWN.start, plan, tails):
        return OWN_IS_FULL
    if not _take_over(cache, limit, vocab_size, requests, CACHED.start, plan, tails):
        return CACHE_IS_FULL
    return DONE


@compiled
def _take_over(
    store: Store, limit: int, vocab_size: int, requests: np.ndarray, column: int, plan: np.ndarray, tails: np.ndarray
) -> bool:
    """For the positions that requests have from a column on. False if there was no room."""
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


@inlined
def own_context(store: Store, request: np.ndarray, limit: int) -> tuple[int, int]:
    """Where the request's context lies in its own automaton: a state, and the length of the suffix."""
    length = min(request[OWN][NUM_TOKENS], limit - 1)
    return settled(store, request[OWN][STATE], length), length


@inlined
def cached_context(store: Store, request: np.ndarray, limit: int, tail: np.ndarray) -> tuple[int, int]:
    """Where it lies in the automaton of all outputs. Its own output says so once that is long enough; until then the
    prompt, which ends in tail, belongs to the context as well."""
    if request[CACHED][STATE] != NONE and request[CACHED][NUM_TOKENS] >= limit - 1:
        return settled(store, request[CACHED][STATE], limit - 1), limit - 1
    return match(store, ROOT, limit, tail[len(tail) - min(len(tail), limit - 1) :])
