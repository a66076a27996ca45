"""Hash tables of the requests' n-grams, which find earlier occurrences of a request's last tokens. One compiled call
handles a whole batch.

In this module, the *end* of an n-gram's occurrence is the number of the request's tokens up to and including this
occurrence. Each request has a hash table with a slot for each of its n-grams of the configured lengths. The slot holds
the end of the n-gram's most recent occurrence or, if leftmost matches are wanted, of the leftmost one.

When a token is appended, the slots of the n-grams that end with this token are read. These slots hold the ends of
earlier occurrences, and a draft can continue after one of them. Then the new end is stored in these slots, unless
leftmost matches are wanted. So the cost of a new token does not depend on the request's length.

Most of the time is spent fetching slots from memory, so the slots of many ends are prefetched together.
"""

from __future__ import annotations

import numpy as np

from specdec_core import compiled
from specdec_proposer_ngram.compiled import array_at, jit_inner, prefetch

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
    """Return the hash of an n-gram that is extended by one token to the left. hashed: the hash of the shorter
    n-gram."""
    product = (hashed ^ np.uint64(token)) * NO_TOKENS
    return product ^ (product >> HALF)


@jit_inner
def home_of(hashed, num_slots):
    """Return the index of the hash-table slot where the search for an n-gram begins. hashed: the n-gram's hash."""
    return np.int64(((hashed & LOW) * np.uint64(num_slots)) >> HALF)


@jit_inner
def prefetch_slots(state, end, shortest, longest, hashes):
    """Compute the hashes of the n-grams that end with token end - 1, and prefetch their hash-table slots.

    hashes: uint64 [longest - shortest + 1], overwritten with the hashes, those of shorter n-grams first.
    """
    tokens, slots, hashed = tokens_of(state), slots_of(state), NO_TOKENS
    for n in range(1, min(end, longest) + 1):
        hashed = with_token(hashed, tokens[end - n])
        if n >= shortest:
            hashes[n - shortest] = hashed
            prefetch(slots, home_of(hashed, len(slots)))


@jit_inner
def exchange(slots, hashed, end, most_recent):
    """Return the end that is stored for an n-gram, or 0 if the n-gram is new. An end is the number of tokens up to and
    including an occurrence. If the n-gram is new or most_recent is set, `end` is stored for it.

    slots: the hash table.
    hashed: the n-gram's hash.
    """
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
    """Store the ends of new n-grams in the hash tables, and set where each request's next draft begins.

    An end is the number of tokens up to and including an n-gram. All n-grams with the end ends[k] belong to the request
    in row rows[k] of states, and hashes[k] holds their hashes. The longest n-gram that occurred earlier is the match,
    and the draft begins after its earlier occurrence.
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
    """Append new tokens to the requests and add the n-grams that end with these tokens to the hash tables.

    states: int64 [num_rows, 6], a row for each request. The constants at the top of the file are its columns.
    rows: the row of each request in `states`.
    new_tokens: the new tokens of all requests, one request after the other.
    num_new: number of new tokens of each request.
    """
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


@compiled("(i8[:,::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, i8, b1, i8[::1], i4[::1], i8[::1])", nogil=True)
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
    """Append each request's new tokens, then draft the tokens that follow its best match.

    A match is an earlier occurrence of the request's last n tokens, where n is from `shortest` to `longest`. The best
    match has the largest n. Of several, it is the most recent or, without most_recent, the leftmost. `counts` gets the
    number of draft tokens of each request, 0 without a match.
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
