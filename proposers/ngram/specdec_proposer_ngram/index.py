"""An index of each request's n-grams, to find earlier occurrences of its last tokens; one compiled call per batch.

An *end* is a number of tokens and stands for the text up to there. Each request has a hash table. Each n-gram of the
configured lengths has a slot in it, which holds the end of its most recent (or leftmost) occurrence. When a token is
appended, the slots of the n-grams that end with it are read: the earlier ends in them are the matches to continue from.
Its own end then replaces them (or not, if the leftmost are wanted). So a step visits one slot for each new token and
length, however long the text.

Most of the time is spent fetching slots from memory, so the slots of many ends are prefetched before the first is read.
"""

from __future__ import annotations

import numpy as np

from specdec_proposer_ngram.compiled import array_at, jit, jit_inner, prefetch

SLOTS, NUM_SLOTS, TOKENS, CAPACITY, NUM_TOKENS, START = range(6)
"""Columns of states, int64 [num_rows, 6], with a row for each request: the address and the capacity of its hash table
and of its tokens, its number of tokens, and the end to draft from, 0 for none.

The hash table's slots are uint64 [num_slots], hash bits | end, 0 if empty; some always stay empty. Tokens are
uint32 [capacity].
"""

END_BITS = np.uint64(28)
END = np.uint64((1 << 28) - 1)
"""The bits of a slot that hold an end. The other 36 are bits of the n-gram's hash and identify the n-gram: in one of
2**36 lookups they match another n-gram, which makes a draft worse."""

NUM_ENDS = 128
"""Number of ends added at a time: enough to overlap memory fetches, and few enough for the processor's cache."""

NO_TOKENS = np.uint64(0x9E3779B97F4A7C15)
"""The hash of an empty n-gram, also the hash's odd multiplier. The product's upper half is folded into the lower."""

HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


@jit_inner
def tokens_of(state):
    return array_at(state[TOKENS], state[CAPACITY], np.uint32)


@jit_inner
def slots_of(state):
    return array_at(state[SLOTS], state[NUM_SLOTS], np.uint64)


@jit_inner
def with_token(hashed, token):
    """The hash of an n-gram extended to the left by a token."""
    product = (hashed ^ np.uint64(token)) * NO_TOKENS
    return product ^ (product >> HALF)


@jit_inner
def home_of(hashed, num_slots):
    """Index of the slot where probing for an n-gram begins. hashed: the n-gram's hash."""
    return np.int64(((hashed & LOW) * np.uint64(num_slots)) >> HALF)


@jit_inner
def prefetch_slots(state, end, shortest, longest, hashes):
    """Prefetch the hash-table slots of the n-grams that end with token end - 1. Writes their hashes, uint64
    [longest - shortest + 1]."""
    tokens, slots, hashed = tokens_of(state), slots_of(state), NO_TOKENS
    for n in range(1, min(end, longest) + 1):
        hashed = with_token(hashed, tokens[end - n])
        if n >= shortest:
            hashes[n - shortest] = hashed
            prefetch(slots, home_of(hashed, len(slots)))


@jit_inner
def exchange(slots, hashed, end, most_recent):
    """Return the end stored for an n-gram (the number of tokens up to an earlier occurrence), 0 for a new n-gram.
    `end` is stored instead if the n-gram is new or if most_recent."""
    i = home_of(hashed, len(slots))
    while slots[i] != 0:
        if (slots[i] ^ hashed) >> END_BITS == 0:
            before = np.int64(slots[i] & END)
            if most_recent:
                slots[i] = (hashed & ~END) | np.uint64(end)
            return before
        i = i + 1 if i + 1 < len(slots) else 0
    slots[i] = (hashed & ~END) | np.uint64(end)
    return 0


@jit_inner
def index_ends(states, rows, ends, hashes, shortest, longest, most_recent):
    """Store each end (the number of tokens up to a new token) in the hash-table slots of the n-grams that end there.

    ends[k] belongs to the request in row rows[k] of states. That request's next draft continues the text after the
    earlier end of the longest n-gram that has one.
    """
    for k, row in enumerate(rows):
        slots, start = slots_of(states[row]), 0
        for n in range(min(ends[k], longest), shortest - 1, -1):
            before = exchange(slots, hashes[k, n - shortest], ends[k], most_recent)
            if start == 0:
                start = before
        states[row, START] = start


@jit_inner
def append(states, rows, new_tokens, num_new, shortest, longest, most_recent):
    """Append new tokens to the requests' texts and index the n-grams that end with them, in order. num_new: number of
    new tokens of each request in `rows`."""
    ends, rows_of_ends = np.empty(NUM_ENDS, np.int64), np.empty(NUM_ENDS, np.int64)
    hashes = np.empty((NUM_ENDS, longest - shortest + 1), np.uint64)
    for row in rows:
        prefetch(tokens_of(states[row]), states[row, NUM_TOKENS])
    k, first = 0, 0
    for b, row in enumerate(rows):
        state = states[row]
        tokens = tokens_of(state)
        for i in range(num_new[b]):
            tokens[state[NUM_TOKENS]] = new_tokens[first + i]
            state[NUM_TOKENS] += 1
            rows_of_ends[k], ends[k] = row, state[NUM_TOKENS]
            prefetch_slots(state, ends[k], shortest, longest, hashes[k])
            k += 1
            if k == NUM_ENDS:
                index_ends(states, rows_of_ends, ends, hashes, shortest, longest, most_recent)
                k = 0
        first += num_new[b]
    index_ends(states, rows_of_ends[:k], ends, hashes, shortest, longest, most_recent)


@jit("(i8[:,::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, i8, b1, i8[::1], i4[::1], i8[::1])")
def draft(
    states,
    rows,  # int64 [batch]   the requests' rows in states
    new_tokens,  # int64 [sum of num_new]   one request after the other
    num_new,  # int64 [batch]
    budgets,  # int64 [batch]
    shortest,
    longest,
    most_recent,
    token_ids,  # int64 [sum of budgets]   written, like the next two
    parents,  # int32 [sum of budgets]
    counts,  # int64 [batch]
):
    """Append each request's new tokens and draft the continuation of its best match.

    The match is the most recent (or leftmost) earlier occurrence of the longest suffix that has one, among suffixes of
    `shortest` to `longest` tokens. Without a match, the request's count is 0.
    """
    append(states, rows, new_tokens, num_new, shortest, longest, most_recent)
    for b, row in enumerate(rows):
        prefetch(tokens_of(states[row]), states[row, START])
        prefetch(tokens_of(states[row]), states[row, START] + budgets[b] - 1)  # may be in another cache line
    node = 0
    for b, row in enumerate(rows):
        state = states[row]
        tokens, i = tokens_of(state), state[START]
        counts[b] = budgets[b] if i > 0 else 0
        for depth in range(counts[b]):
            token_ids[node], parents[node] = tokens[i], depth - 1
            node += 1
            # A match that reaches the end of the text is one period of a repetition: start over.
            i = i + 1 if i + 1 < state[NUM_TOKENS] else state[START]
