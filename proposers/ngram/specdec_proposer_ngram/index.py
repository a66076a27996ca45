"""Where a request's tokens have occurred before: an index that grows with them, compiled, for a whole batch per call.

An *end* is a number of tokens: the text up to there. Every end is kept in one slot of a hash table, at some length n,
found by the hash of the n tokens before it. Ends come in at the shortest length. Where two meet, having the same n
tokens, the better one (the more recent, or the leftmost) stays, and the other moves on to the first length at which the
two differ. Beyond the longest it is forgotten: it would never be chosen.

The match wanted is the end that agrees with the text's own on most tokens, say m, and the best of those. Whatever made
it move on was better, so it agrees with it on fewer than m tokens: with m or more it would be the match itself. So the
match is kept at a length of at most m, where the slot of the text's own last tokens has it.

Memory is what costs time: a slot or token of a long text is in no cache. So work is done on many ends at a time, and in
rounds: ask for all their slots, ask for all the tokens that those point to, and only then compare.
"""

from __future__ import annotations

import numpy as np

from specdec_proposer_ngram.compiled import array_at, compiled, inner, prefetch

ADDRESS, CAPACITY, NUM_TOKENS, END_BITS = range(4)
"""Columns of states, int64 [num_rows, 4], a row for each request: where its memory begins, how many tokens have room
there, how many there are, and how many bits of a slot an end takes. The other bits, of the hash, are called the mark.

The memory: tokens uint32 [capacity], then slots uint32 [capacity * SLOTS_PER_TOKEN]; a slot is mark | end, 0 if empty.
"""

SLOTS_PER_TOKEN = 2
"""Collisions are few if half of the slots are empty. A text has fewer ends than tokens to keep."""

ROW, END, LENGTH, HOME, MARK = range(5)
"""Columns of items, int64 [n, 5], ends that are being put or looked for: of whom, at which length, where the search for
the slot begins, and the mark it has."""

NUM_ITEMS = 512
"""How many ends are put at a time: enough for memory to work on, and few enough to stay in the cache meanwhile."""

NO_TOKENS = np.uint64(0x9E3779B97F4A7C15)
"""The hash of no tokens: any number but 0, and odd. Multiplying by it stirs the upper half, which is folded into the
lower."""

HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


@inner
def tokens_of(state):
    return array_at(state[ADDRESS], state[CAPACITY], np.uint32)


@inner
def slots_of(state):
    return array_at(state[ADDRESS] + 4 * state[CAPACITY], state[CAPACITY] * SLOTS_PER_TOKEN, np.uint32)


@inner
def with_token(hashed, token):
    """The hash of an n-gram with the token before it."""
    product = (hashed ^ np.uint64(token)) * NO_TOKENS
    return product ^ (product >> HALF)


@inner
def ask_for_slot(state, item, hashed):
    """hashed: of the item's n-gram."""
    slots = slots_of(state)
    item[HOME] = np.int64(((hashed >> HALF) * np.uint64(len(slots))) >> HALF)
    item[MARK] = np.int64((hashed << np.uint64(state[END_BITS])) & LOW)
    prefetch(slots, item[HOME])


@inner
def marked_end(state, slot, mark):
    """The end in a slot, 0 if there is none or another mark."""
    end = np.int64(slot) ^ mark
    return end if end >> state[END_BITS] == 0 else 0


@inner
def ask_for_tokens(states, items, longest):
    """Those before the ends that the items' slots hold."""
    for item in items:
        state = states[item[ROW]]
        end = marked_end(state, slots_of(state)[item[HOME]], item[MARK])
        if end > 0:
            prefetch(tokens_of(state), end - 1)
            prefetch(tokens_of(state), end - longest)  # maybe in another cache line


@inner
def num_common(tokens, end, other, longest):
    """On how many tokens before them two ends agree, up to the longest."""
    most = min(end, other, longest)
    length = 0
    while length < most and tokens[end - 1 - length] == tokens[other - 1 - length]:
        length += 1
    return length


@inner
def put(states, items, longest, most_recent):
    """Keep the items' ends, each at its length or a greater one."""
    num_left = len(items)
    while num_left > 0:
        for item in items[:num_left]:
            tokens, hashed = tokens_of(states[item[ROW]]), NO_TOKENS
            for n in range(item[LENGTH]):
                hashed = with_token(hashed, tokens[item[END] - 1 - n])
            ask_for_slot(states[item[ROW]], item, hashed)
        ask_for_tokens(states, items[:num_left], longest)
        num_moved = 0
        for item in items[:num_left]:
            end, length = put_one(states[item[ROW]], item, longest, most_recent)
            if length < min(end, longest):
                items[num_moved, ROW], items[num_moved, END], items[num_moved, LENGTH] = item[ROW], end, length + 1
                num_moved += 1
        num_left = num_moved


@inner
def put_one(state, item, longest, most_recent):
    """Put an end at its length. Returns the end that has to move on, and on how many tokens it agrees with the one that
    stays; for none, 0 and 0."""
    tokens, slots = tokens_of(state), slots_of(state)
    i, end = item[HOME], item[END]
    while slots[i] != 0:
        other = marked_end(state, slots[i], item[MARK])
        length = num_common(tokens, end, other, longest)
        if length >= item[LENGTH]:
            if (end > other) == most_recent:
                slots[i] = item[MARK] | end
                return other, length
            return end, length
        i = i + 1 if i + 1 < len(slots) else 0
    slots[i] = item[MARK] | end
    return 0, 0


@inner
def take_over(states, rows, new_tokens, num_new, shortest, longest, most_recent):
    """Append new tokens, and put all ends but the last: at least one token follows a match."""
    items = np.empty((NUM_ITEMS, 5), np.int64)
    num_items, first = 0, 0
    for row in rows:
        prefetch(tokens_of(states[row]), states[row, NUM_TOKENS])
    for b, row in enumerate(rows):
        state, num = states[row], num_new[b]
        before, after = state[NUM_TOKENS], state[NUM_TOKENS] + num
        tokens = tokens_of(state)
        for i in range(num):
            tokens[before + i] = new_tokens[first + i]
        first += num
        state[NUM_TOKENS] = after
        for end in range(max(before, shortest), after):
            items[num_items, ROW], items[num_items, END], items[num_items, LENGTH] = row, end, shortest
            num_items += 1
            if num_items == NUM_ITEMS:
                put(states, items, longest, most_recent)
                num_items = 0
    put(states, items[:num_items], longest, most_recent)


@inner
def look_up(states, rows, shortest, longest):
    """Items for the last tokens of each request at all lengths that it has, in order."""
    items = np.empty((len(rows) * (longest - shortest + 1), 5), np.int64)
    num_items = 0
    for row in rows:
        state = states[row]
        tokens, end, hashed = tokens_of(state), state[NUM_TOKENS], NO_TOKENS
        for n in range(1, min(end, longest) + 1):
            hashed = with_token(hashed, tokens[end - n])
            if n >= shortest:
                items[num_items, ROW] = row
                ask_for_slot(state, items[num_items], hashed)
                num_items += 1
    ask_for_tokens(states, items[:num_items], longest)
    return items[:num_items]


@inner
def better_end(state, item, start, length, shortest, longest, most_recent):
    """start, a match of length tokens, or what is better than it among the ends in an item's slots."""
    tokens, slots = tokens_of(state), slots_of(state)
    i = item[HOME]
    while slots[i] != 0:
        end = marked_end(state, slots[i], item[MARK])
        num = num_common(tokens, end, state[NUM_TOKENS], longest)
        if num >= shortest and (num > length or (num == length and (end > start) == most_recent)):
            start, length = end, num
        i = i + 1 if i + 1 < len(slots) else 0
    return start, length


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
    items = look_up(states, rows, shortest, longest)
    k, node = 0, 0
    for b, row in enumerate(rows):
        state = states[row]
        start, length = 0, 0
        while k < len(items) and items[k, ROW] == row:
            start, length = better_end(state, items[k], start, length, shortest, longest, most_recent)
            k += 1
        counts[b] = budgets[b] if start > 0 else 0
        tokens, i = tokens_of(state), start
        for depth in range(counts[b]):
            token_ids[node], parents[node] = tokens[i], depth - 1
            node += 1
            # Cut short by the end of the text, it is a whole period of a text that repeats itself: so it goes round.
            i = i + 1 if i + 1 < state[NUM_TOKENS] else start
