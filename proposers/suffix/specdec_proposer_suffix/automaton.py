"""A suffix automaton with counts: how often each string of up to `limit` tokens occurs in a set of token sequences.

Strings that end at the same places share a state (Blumer et al. 1985, here for several sequences and strings of bounded
length). They are suffixes of the state's longest string. The next shorter suffix belongs to another state, the `link`
of this state. So from the state of the longest string that ends at a place, a path of links leads to the states of all
suffixes that end there. Adding or removing an occurrence changes only that path, and the path is short because suffixes
of many lengths share a state.

A growing sequence has a `position`, int64 [2]: a state and the sequence's number of tokens. The state is that of the
sequence's last limit - 1 tokens, or of the whole sequence if it is shorter. Changes of the automaton can make this
state outdated. If another sequence's new token split the state, `state_of_length` finds the right one. If `remove`
freed the state, `match` finds the right one.

The root, the state of the empty string, has no count and no link.
"""

from __future__ import annotations

import numpy as np

from specdec_proposer_suffix.compiled import jit, jit_inline
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
    mark_last_seen,
    move_edges,
    new_state,
    redirect,
    target_of,
)

STATE, NUM_TOKENS = 0, 1
"""Indices into a position."""

DYING = -1
"""Count of a state that lost its last occurrence. `remove` frees it one token later, when its last edge is deleted."""


@jit
def new_root(store: Store) -> int:
    return new_state(store, 0, NONE)


@jit_inline
def state_of_length(store: Store, state: int, length: int) -> int:
    """Return the automaton state to which a suffix of `length` tokens belongs now.

    state: the state to which the suffix belonged earlier. Since then this state may have been split in two.
    """
    link = store.states[state, LINK]
    while link != NONE and length <= store.states[link, LENGTH]:
        state = link
        link = store.states[state, LINK]
    return state


@jit
def match(store: Store, root: int, limit: int, tokens: np.ndarray) -> tuple[int, int]:
    """Find the longest suffix of `tokens`, of at most limit - 1 tokens, that occurs in the automaton with this root.
    Returns the suffix's state and its number of tokens, or the root and 0 if no suffix occurs."""
    state, length = root, 0
    for token in tokens:
        target = target_of(store, state, token)
        while target == NONE and state != root:
            state = store.states[state, LINK]
            length = store.states[state, LENGTH]
            target = target_of(store, state, token)
        if target != NONE:
            length = min(length + 1, limit - 1)
            state = state_of_length(store, target, length)
    return state, length


@jit_inline
def extend(store: Store, limit: int, vocab_size: int, position: np.ndarray, token_ids: np.ndarray, owner: int) -> bool:
    """Append tokens to a sequence in the automaton and advance the sequence's position in place.

    owner: the sequence's id.

    Returns False if the store was too full for all tokens; position[NUM_TOKENS] then counts those that were appended.
    """
    for token in token_ids:
        if not has_room_for_token(store, limit, vocab_size):
            return False
        length = min(position[NUM_TOKENS], limit - 1)
        position[STATE] = _append(store, limit, state_of_length(store, position[STATE], length), length, token, owner)
        position[NUM_TOKENS] += 1
    return True


@jit_inline
def _append(store: Store, limit: int, state: int, length: int, token: int, owner: int) -> int:
    reached = target_of(store, state, token)
    if reached == NONE:
        reached = new_state(store, length + 1, NONE)
        _link_new(store, limit, state, reached, token)
    elif store.states[reached, LENGTH] > length + 1:  # its longer strings do not occur here
        reached = _split(store, limit, reached, length + 1, state, token)
    _count(store, state, length, reached, token, owner)
    return reached


@jit_inline
def _link_new(store: Store, limit: int, state: int, reached: int, token: int) -> None:
    """Connect a new automaton state, `reached`: set its link, and add edges with `token` that lead to it. These edges
    start from `state` and from the states of shorter suffixes that `token` never followed before."""
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


@jit_inline
def _split(store: Store, limit: int, state: int, length: int, source: int, token: int) -> int:
    """Split an automaton state: move its strings of up to `length` tokens to a new state. Returns the new state.

    source: the state from which `token` leads to the longest of the moved strings.
    """
    states = store.states
    link = states[state, LINK]
    shorter = new_state(store, length, link)
    states[link, CHILDREN] ^= state ^ shorter
    states[shorter, CHILDREN] = state
    states[shorter, COUNT] = states[state, COUNT]
    mark_last_seen(store, shorter, last_seen_in(store, state))
    states[state, LINK] = shorter
    if length == limit - 1:  # the old state keeps the strings of `limit` tokens, which have no continuations
        move_edges(store, state, shorter)
    else:
        copy_edges(store, state, shorter)
    while source != NONE and target_of(store, source, token) == state:
        redirect(store, source, token, shorter)
        source = states[source, LINK]
    return shorter


@jit_inline
def _count(store: Store, state: int, length: int, reached: int, token: int, owner: int) -> None:
    """Count one more occurrence of each string that ends with a newly appended token, and update the edges into the
    states of these strings.

    state, length: state and number of tokens of the longest suffix that ends right before the token.
    reached: the state of the longest string that ends with the token. A path of links leads from it to the states of
        the shorter strings.
    owner: the id of the sequence to which the token was appended.
    """
    states = store.states
    target = reached
    while states[target, LINK] != NONE:
        states[target, COUNT] += 1
        mark_last_seen(store, target, owner)
        target = states[target, LINK]
    state, target = state_of_length(store, state, length), reached  # `_split` may have moved the suffix
    while states[state, LINK] != NONE:
        while states[states[target, LINK], LENGTH] > length:
            target = states[target, LINK]
        count_edge(store, state, token, target)
        state = states[state, LINK]
        length = states[state, LENGTH]


@jit
def remove(store: Store, limit: int, tokens: np.ndarray) -> None:
    """Remove a sequence from the automaton whose root is ROOT. The result equals an automaton that was built without
    the sequence.

    For each token, one occurrence is subtracted from every state on the token's path of links. A state without
    occurrences is freed one token later, when its last edge is deleted. A state's children are the states that link to
    it. A state with a single child is merged into the child if both have the same count.
    """
    states = store.states
    before, num_before = np.empty(limit + 1, np.int64), 0  # states of the suffixes that end one token earlier
    state, length = ROOT, 0
    reached = NONE if len(tokens) == 0 else target_of(store, ROOT, tokens[0])
    for i in range(len(tokens)):
        length = min(length + 1, limit - 1)
        state = state_of_length(store, reached, length)
        # Look up the next token's state now: this token's state may be freed below, the next one still occurs.
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


@jit
def _take_one(store: Store, limit: int, state: int, before: np.ndarray, token: int) -> int:
    """Subtract one occurrence from an automaton state. A state's children are the states that link to it. If the state
    has a single child, and both have the same count now, the state is merged into the child.

    before: states of the suffixes that end one token earlier.
    token: the token of the edges that lead from these states to `state`.

    Returns the state that has the edges of `state` afterwards: `state` itself or, after a merge, the child. Returns
    NONE if the child had edges of its own; the edges of the merged state are then deleted.
    """
    states = store.states
    states[state, COUNT] -= 1
    if states[state, COUNT] == 0:
        states[states[state, LINK], CHILDREN] ^= state
        return state
    child = states[state, CHILDREN]
    # CHILDREN is an exclusive or: with several children it may look like any state, but no child has the same count.
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
    if states[state, LENGTH] == limit - 1:  # the child's strings were too long for edges, and now it has shorter ones
        heir = child
        before[before == state] = child
        move_edges(store, state, child)
    else:
        delete_edges(store, state)
    free_state(store, state)
    return heir


@jit
def _repair(store: Store, before: np.ndarray, token: int) -> None:
    """Update edges after the states to which they lead have lost an occurrence. These are the edges with `token` that
    start from the root and from the states in `before`.

    Deletes edges to states without occurrences, marks best tokens as STALE, and frees the DYING states of `before`.
    """
    states = store.states
    for i in range(-1, len(before)):
        source = ROOT if i < 0 else before[i]
        target = target_of(store, source, token)
        if target != NONE:
            discount_edge(store, source, token, target)
        if states[source, COUNT] == DYING:
            free_state(store, source)


@jit
def free_automaton(store: Store, root: int) -> None:
    """Free the root of an automaton and all states that can be reached from it."""
    states = store.states
    states[root, LINK] = NONE
    pending = root  # a linked list of states that reuses LINK, which is not needed any more
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


@jit
def _reach(states: np.ndarray, state: int, pending: int) -> int:
    if states[state, COUNT] == 0:
        return pending
    states[state, COUNT] = 0
    states[state, LINK] = pending
    return state
