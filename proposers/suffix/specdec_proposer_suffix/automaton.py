"""A suffix automaton with counts: all strings of up to `limit` tokens that occur in some sequences, and how often.

Strings that end at the same places share a state (Blumer et al. 1985, here for several sequences and strings of bounded
length). A state's strings are the suffixes of its longest one down to, and without, the longest of its `link`: so the
states of all suffixes that end at one place lie on one path of links. That path is all that an occurrence more or less
changes, and it is short: suffixes of many lengths share a state wherever they have one history.

A sequence that still grows is known by its position, int64 [2]: the state of its longest suffix that may be followed by
another token (limit - 1 tokens, or all of it if it is shorter), and how many tokens it has. Another sequence may split
that state; `settled` finds the right half. Removal may free it: `match` finds it again after a `remove`.

The root, the state of the empty string, has no count and no link.
"""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.compiled import compiled, inlined
from specdec_proposer_suffix.store import (
    BEST_TARGET,
    BEST_TOKEN,
    CHILDREN,
    COUNT,
    FIRST_EDGE,
    LENGTH,
    LINK,
    NEXT,
    NONE,
    ROOT,
    TARGET,
    TOP,
    Store,
    add_edge,
    copy_edges,
    count_edge,
    delete_edges,
    discount_edge,
    free_state,
    has_room_for_token,
    last_seen_in,
    move_edges,
    new_state,
    redirect,
    see,
    target_of,
)

STATE, NUM_TOKENS = 0, 1
"""Of a position."""

DYING = -1
"""The count of a state without occurrences, between the place where it lost its last one and the next place."""


@compiled
def new_root(store: Store) -> int:
    return new_state(store, 0, NONE)


@inlined
def settled(store: Store, state: int, length: int) -> int:
    """The state of a suffix of that length, given one that once was it."""
    link = store.states[state, LINK]
    while link != NONE and length <= store.states[link, LENGTH]:
        state = link
        link = store.states[state, LINK]
    return state


@compiled
def match(store: Store, root: int, limit: int, tokens: np.ndarray) -> tuple[int, int]:
    """The state and the length of the longest suffix of tokens, of at most limit - 1 of them, that occurs."""
    state, length = root, 0
    for token in tokens:
        target = target_of(store, state, token)
        while target == NONE and state != root:
            state = store.states[state, LINK]
            length = store.states[state, LENGTH]
            target = target_of(store, state, token)
        if target != NONE:
            length = min(length + 1, limit - 1)
            state = settled(store, target, length)
    return state, length


@inlined
def extend(store: Store, limit: int, vocab_size: int, position: np.ndarray, token_ids: np.ndarray, owner: int) -> bool:
    """Append tokens to the sequence at a position, and move that. False if there was no room for all of them: those
    that position[NUM_TOKENS] does not count are still to be appended."""
    for token in token_ids:
        if not has_room_for_token(store, limit, vocab_size):
            return False
        length = min(position[NUM_TOKENS], limit - 1)
        position[STATE] = _append(store, limit, settled(store, position[STATE], length), length, token, owner)
        position[NUM_TOKENS] += 1
    return True


@inlined
def _append(store: Store, limit: int, state: int, length: int, token: int, owner: int) -> int:
    reached = target_of(store, state, token)
    if reached == NONE:
        reached = new_state(store, length + 1, NONE)
        _link_new(store, limit, state, reached, token)
    elif store.states[reached, LENGTH] > length + 1:  # the longer ones do not occur here
        reached = _split(store, limit, reached, length + 1, state, token)
    _count(store, state, length, reached, token, owner)
    return reached


@inlined
def _link_new(store: Store, limit: int, state: int, reached: int, token: int) -> None:
    """Lead all suffixes at state that never went on with token to the new state, and find its link."""
    states = store.states
    while True:
        add_edge(store, state, token, reached)
        link = states[state, LINK]
        if link == NONE:
            link = state  # the root
            break
        state = link
        link = target_of(store, state, token)
        if link != NONE:
            if states[link, LENGTH] > states[state, LENGTH] + 1:
                link = _split(store, limit, link, states[state, LENGTH] + 1, state, token)
            break
    states[reached, LINK] = link
    states[link, CHILDREN] ^= reached


@inlined
def _split(store: Store, limit: int, state: int, length: int, source: int, token: int) -> int:
    """Give the strings of up to length tokens a state of their own. source: the state from which token leads to the
    longest of them."""
    states = store.states
    link = states[state, LINK]
    shorter = new_state(store, length, link)
    states[link, CHILDREN] ^= state ^ shorter
    states[shorter, CHILDREN] = state
    states[shorter, COUNT] = states[state, COUNT]
    see(store, shorter, last_seen_in(store, state))
    states[state, LINK] = shorter
    if length == limit - 1:  # what is left are strings of limit tokens, after which nothing is known
        move_edges(store, state, shorter)
    else:
        copy_edges(store, state, shorter)
    while source != NONE and target_of(store, source, token) == state:
        redirect(store, source, token, shorter)
        source = states[source, LINK]
    return shorter


@inlined
def _count(store: Store, state: int, length: int, reached: int, token: int, owner: int) -> None:
    """One occurrence more of all suffixes that end in reached, where those at state went on with token."""
    states = store.states
    target = reached
    while states[target, LINK] != NONE:
        states[target, COUNT] += 1
        see(store, target, owner)
        target = states[target, LINK]
    state, target = settled(store, state, length), reached  # for it may just have been split
    while states[state, LINK] != NONE:
        while states[states[target, LINK], LENGTH] > length:
            target = states[target, LINK]
        count_edge(store, state, token, target)
        state = states[state, LINK]
        length = states[state, LENGTH]


@compiled
def remove(store: Store, limit: int, tokens: np.ndarray) -> None:
    """Take a sequence out of the automaton of ROOT again, leaving the automaton of the others.

    It walks the sequence once more and takes one occurrence from every state on the path of each place. A state
    without any is freed, a place later, when its last edge goes; one that has become indistinguishable from a longer
    one, its only child, is merged into it. Edges into either come from the path of the place before, so they are at
    hand.
    """
    states = store.states
    before, num_before = np.empty(limit + 1, np.int64), 0  # states of the suffixes that end one place earlier
    state, length = ROOT, 0
    reached = NONE if len(tokens) == 0 else target_of(store, ROOT, tokens[0])
    for i in range(len(tokens)):
        length = min(length + 1, limit - 1)
        state = settled(store, reached, length)
        # The next place's state is looked up before this one's may vanish; it cannot, for it occurs there still.
        following = NONE
        if i + 1 < len(tokens):
            following = target_of(store, state, tokens[i + 1])
        here, num_here = np.empty(limit + 1, np.int64), 0
        target = reached
        while target != ROOT:
            link = states[target, LINK]
            here[num_here] = _take_one(store, limit, target, before[:num_before], tokens[i])
            num_here += here[num_here] != NONE
            target = link
        _repair(store, before[:num_before], tokens[i])
        for j in range(num_here):
            if states[here[j], COUNT] == 0:
                states[here[j], COUNT] = DYING
        before, num_before, reached = here, num_here, following
    for i in range(num_before):
        if states[before[i], COUNT] == DYING:
            free_state(store, before[i])


@compiled
def _take_one(store: Store, limit: int, state: int, before: np.ndarray, token: int) -> int:
    """One occurrence less of a state. Returns whose edges its strings now follow: its own, or those that its child took
    over when it was merged into it; NONE if the child had edges already, for those do not lead to the next place."""
    states = store.states
    states[state, COUNT] -= 1
    if states[state, COUNT] == 0:
        states[states[state, LINK], CHILDREN] ^= state
        return state
    child = states[state, CHILDREN]
    # If it has several children, then none of them has all of its occurrences, whatever their exclusive or points to.
    if not 0 < child < store.book[TOP] or states[child, LINK] != state or states[child, COUNT] != states[state, COUNT]:
        return state
    link = states[state, LINK]
    states[child, LINK] = link
    states[link, CHILDREN] ^= state ^ child
    for i in range(-1, len(before)):
        source = ROOT if i < 0 else before[i]
        if target_of(store, source, token) == state:
            redirect(store, source, token, child)
    heir = NONE
    if states[state, LENGTH] == limit - 1:  # the child's strings were too long for edges, and now some are not
        heir = child
        before[before == state] = child
        move_edges(store, state, child)
    else:
        delete_edges(store, state)
    free_state(store, state)
    return heir


@compiled
def _repair(store: Store, before: np.ndarray, token: int) -> None:
    """After the states of a place lost an occurrence: delete the edges to those that died, doubt what was best, and
    free those of the place before that had died."""
    states = store.states
    for i in range(-1, len(before)):
        source = ROOT if i < 0 else before[i]
        target = target_of(store, source, token)
        if target != NONE:
            discount_edge(store, source, token, target)
        if states[source, COUNT] == DYING:
            free_state(store, source)


@compiled
def free_automaton(store: Store, root: int) -> None:
    """Free all states that can be reached from a root, and the root."""
    states = store.states
    states[root, LINK] = NONE
    pending = root  # a list of states through their links, which are not needed any more
    while pending != NONE:
        state = pending
        pending = states[state, LINK]
        edge = states[state, FIRST_EDGE]
        if edge == NONE and states[state, BEST_TOKEN] != NONE:
            pending = _reach(states, states[state, BEST_TARGET], pending)
        while edge != NONE:
            pending = _reach(states, store.edges[edge, TARGET], pending)
            edge = store.edges[edge, NEXT]
        delete_edges(store, state)
        free_state(store, state)


@compiled
def _reach(states: np.ndarray, state: int, pending: int) -> int:
    if states[state, COUNT] == 0:
        return pending
    states[state, COUNT] = 0
    states[state, LINK] = pending
    return state
