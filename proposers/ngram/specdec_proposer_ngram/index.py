"""Where a request's n-grams have last occurred: an index that grows with its tokens, compiled, a whole batch per call.

An *end* is a number of tokens: the text up to there. A hash table has a slot for each n-gram of the lengths wanted,
with the end of its most recent (or of its leftmost) occurrence. A new end looks into the slots of the n-grams before
it, sees where those were last, and takes their place. So what the text's own end is to be continued with is known as
soon as it is taken over, and a step visits one slot for each new token and length, however long the text.

Memory is what costs time: a slot of a long text is in no cache. So those of many ends are asked for before the first of
them is read.
"""

from __future__ import annotations

import numpy as np

from specdec_proposer_ngram.compiled import array_at, compiled, inner, prefetch

SLOTS, NUM_SLOTS, TOKENS, CAPACITY, NUM_TOKENS, START = range(6)
"""Columns of states, int64 [num_rows, 6], a row for each request: where its slots and its tokens are and how many of
them there is room for, how many tokens there are, and the end to draft from, 0 for none.

Slots are uint64 [num_slots], mark | end, 0 if empty, and more than are ever filled. Tokens are uint32 [capacity].
"""

END_BITS = np.uint64(28)
END = np.uint64((1 << 28) - 1)
"""The bits of a slot that hold an end. The other 36, its mark, are of the n-gram's hash, and stand for the n-gram: once
in 2**36 times the slot of another is taken for its own, and a draft is worse for it."""

NUM_ENDS = 128
"""How many ends are taken over at a time: enough for memory to work on, and few enough for the cache to hold."""

NO_TOKENS = np.uint64(0x9E3779B97F4A7C15)
"""The hash of no tokens: any number but 0, and odd. Multiplying by it stirs the upper half, which is folded into the
lower."""

HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


@inner
def tokens_of(state):
    return array_at(state[TOKENS], state[CAPACITY], np.uint32)


@inner
def slots_of(state):
    return array_at(state[SLOTS], state[NUM_SLOTS], np.uint64)


@inner
def with_token(hashed, token):
    """The hash of an n-gram with the token before it."""
    product = (hashed ^ np.uint64(token)) * NO_TOKENS
    return product ^ (product >> HALF)


@inner
def home_of(hashed, num_slots):
    """Where the search for an n-gram's slot begins."""
    return np.int64(((hashed & LOW) * np.uint64(num_slots)) >> HALF)


@inner
def ask_for_slots(state, end, shortest, longest, hashes):
    """Those of the n-grams before an end, whose hashes are written to hashes, uint64 [longest - shortest + 1]."""
    tokens, slots, hashed = tokens_of(state), slots_of(state), NO_TOKENS
    for n in range(1, min(end, longest) + 1):
        hashed = with_token(hashed, tokens[end - n])
        if n >= shortest:
            hashes[n - shortest] = hashed
            prefetch(slots, home_of(hashed, len(slots)))


@inner
def exchange(slots, hashed, end, most_recent):
    """The end of an n-gram's occurrence so far, 0 if there is none. It is replaced by a more recent one, if wanted."""
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


@inner
def take_over_ends(states, rows, ends, hashes, shortest, longest, most_recent):
    """Exchange them, and draft from where the longest n-gram that was there before has occurred."""
    for k, row in enumerate(rows):
        slots, start = slots_of(states[row]), 0
        for n in range(min(ends[k], longest), shortest - 1, -1):
            before = exchange(slots, hashes[k, n - shortest], ends[k], most_recent)
            if start == 0:
                start = before
        states[row, START] = start


@inner
def take_over(states, rows, new_tokens, num_new, shortest, longest, most_recent):
    """Append new tokens, and take over the ends that come with them, in order."""
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
            ask_for_slots(state, ends[k], shortest, longest, hashes[k])
            k += 1
            if k == NUM_ENDS:
                take_over_ends(states, rows_of_ends, ends, hashes, shortest, longest, most_recent)
                k = 0
        first += num_new[b]
    take_over_ends(states, rows_of_ends[:k], ends, hashes, shortest, longest, most_recent)


@compiled("(i8[:,::1], i8[::1], i8[::1], i8[::1], i8[::1], i8, i8, b1, i8[::1], i4[::1], i8[::1])")
def draft(
    states,
    rows,  # int64 [batch]   of the requests in states
    new_tokens,  # int64 [sum of num_new]   of all requests
    num_new,  # int64 [batch]
    budgets,  # int64 [batch]
    shortest,
    longest,
    most_recent,
    token_ids,  # int64 [sum of budgets]   these three are written to
    parents,  # int32 [sum of budgets]
    counts,  # int64 [batch]
):
    """Take over new tokens, and draft what followed the best match: of the longest suffix of the tokens, of shortest to
    longest tokens, that occurs before, the most recent or the leftmost occurrence."""
    take_over(states, rows, new_tokens, num_new, shortest, longest, most_recent)
    for b, row in enumerate(rows):
        prefetch(tokens_of(states[row]), states[row, START])
        prefetch(tokens_of(states[row]), states[row, START] + budgets[b] - 1)  # maybe in another line of the cache
    node = 0
    for b, row in enumerate(rows):
        state = states[row]
        tokens, i = tokens_of(state), state[START]
        counts[b] = budgets[b] if i > 0 else 0
        for depth in range(counts[b]):
            token_ids[node], parents[node] = tokens[i], depth - 1
            node += 1
            # Cut short by the end of the text, it is a whole period of a text that repeats itself: so it goes round.
            i = i + 1 if i + 1 < state[NUM_TOKENS] else state[START]
