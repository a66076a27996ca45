"""Storage of suffix automata: states and edges in flat arrays, whose entries are allocated and freed.

States and edges are represented by their indices in `states` and `edges`. Most states have a single edge, which is kept
in the state's own entry as its best edge. If a state has more edges, all of them are in `edges`, which is a hash table
(open addressing, linear probing, backward-shift deletion). There the edges of a state also form a doubly linked list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_proposer_suffix.compiled import jit, jit_inline

NONE = -1

# Columns of `states`
LENGTH = 0  # of its longest string, in tokens. A free state: NONE
LINK = 1  # the state of the longest suffix that has other occurrences too. A free state: the next free one
COUNT = 2  # occurrences of each of its strings
FIRST_EDGE = 3  # the first of its edges in the table; NONE: it has at most one edge, its best
BEST_TOKEN = 4  # the most frequent next token, for equal counts the last seen (after a removal, any of them);
#                 NONE: no token follows; STALE
BEST_TARGET = 5  # the state that BEST_TOKEN leads to
BEST_COUNT = 6  # COUNT of BEST_TARGET, updated together with it
CHILDREN = 7  # exclusive or of the states whose link this is: equals the child if there is only one
STATE_WIDTH = 8  # half a cache line, so that one fetch reads a state

STALE = -2
"""Value of BEST_TOKEN after occurrences were removed: `best_of` computes it again when it is needed."""

# Columns of `edges`
SOURCE = 0  # NONE: there is no edge here
TOKEN = 1
TARGET = 2
NEXT = 3  # in its state's list, NONE: the last
PREVIOUS = 4  # NONE: the first
EDGE_WIDTH = 5

STATE_BYTES = 4 * (STATE_WIDTH + EDGE_WIDTH + 1)
"""Memory of a store per state of its capacity, with one edge in the table: source code needs less than one."""

ROOT = 0
"""Root of the automaton in a store that sequences can be removed from. There is only one."""

# Entries of `book`
FREE = 0  # first free state; NONE if there is none
NUM_STATES = 1  # states in use
NUM_EDGES = 2  # edges in the table
TOP = 3  # states ever used
LAST_SEEN = 4  # from here on, if recorded: the id of the sequence that each state was last seen in


class Store(NamedTuple):
    states: np.ndarray  # int32 [state capacity, STATE_WIDTH]
    edges: np.ndarray  # int32 [state capacity, EDGE_WIDTH]
    book: np.ndarray  # int32 [LAST_SEEN], or [LAST_SEEN + state capacity] if last sequences are recorded

    @classmethod
    def empty(cls, num_states: int, records_last_seen: bool = False) -> Store:
        states = np.empty((num_states, STATE_WIDTH), np.int32)
        edges = np.full((num_states, EDGE_WIDTH), NONE, np.int32)
        book = np.zeros(LAST_SEEN + num_states * records_last_seen, np.int32)
        book[FREE] = NONE
        return cls(states, edges, book)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)


@jit_inline
def has_room(store: Store, num_states: int, num_edges: int) -> bool:
    """Whether num_states more automaton states and num_edges more edges fit into the store. A quarter of the edge hash
    table stays free to keep probing short."""
    return (
        store.book[NUM_STATES] + num_states <= len(store.states)
        and (store.book[NUM_EDGES] + num_edges) * 4 <= len(store.edges) * 3
    )


@jit_inline
def has_room_for_token(store: Store, limit: int, vocab_size: int) -> bool:
    """Whether the store has room to append one more token to an automaton. This takes at most two states, two edges for
    each suffix, and a copy of all edges of another state."""
    return has_room(store, 2, 2 * limit + min(vocab_size, store.book[NUM_EDGES]))


@jit_inline
def new_state(store: Store, length: int, link: int) -> int:
    """Allocate an automaton state without occurrences and edges, and return its index. The store must have room for it.

    length: number of tokens of the state's longest string.
    link: the state's suffix link; NONE for a root.
    """
    states, book = store.states, store.book
    state = book[FREE]
    if state == NONE:
        state = book[TOP]
        book[TOP] += 1
    else:
        book[FREE] = states[state, LINK]
    book[NUM_STATES] += 1
    states[state, LENGTH] = length
    states[state, LINK] = link
    states[state, COUNT] = 0
    states[state, FIRST_EDGE] = NONE
    states[state, BEST_TOKEN] = NONE
    states[state, BEST_TARGET] = NONE
    states[state, BEST_COUNT] = 0
    states[state, CHILDREN] = 0
    return state


@jit_inline
def free_state(store: Store, state: int) -> None:
    """Return an automaton state to the list of free states. Its edges must be deleted already."""
    store.states[state, LENGTH] = NONE
    store.states[state, LINK] = store.book[FREE]
    store.book[FREE] = state
    store.book[NUM_STATES] -= 1


@jit_inline
def target_of(store: Store, source: int, token: int) -> int:
    """Return the automaton state to which `token` leads from the state `source`, or NONE if there is no such edge."""
    if store.states[source, BEST_TOKEN] == token:
        return store.states[source, BEST_TARGET]
    if store.states[source, FIRST_EDGE] == NONE:
        return NONE
    edge = _find(store.edges, source, token)
    return NONE if edge == NONE else store.edges[edge, TARGET]


@jit_inline
def add_edge(store: Store, source: int, token: int, target: int) -> None:
    """Add an edge with `token` from the automaton state `source` to the state `target`. `source` must have no edge with
    this token yet, and the edge hash table must have room for two edges."""
    states = store.states
    if states[source, FIRST_EDGE] == NONE:
        if states[source, BEST_TOKEN] == NONE:
            states[source, BEST_TOKEN], states[source, BEST_TARGET] = token, target
            states[source, BEST_COUNT] = states[target, COUNT]
            return
        _insert(store, source, states[source, BEST_TOKEN], states[source, BEST_TARGET])
    _insert(store, source, token, target)


@jit_inline
def redirect(store: Store, source: int, token: int, target: int) -> None:
    """Let the edge with `token` from the automaton state `source` lead to the state `target`. The edge must exist."""
    states = store.states
    if states[source, BEST_TOKEN] == token:
        states[source, BEST_TARGET] = target
    if states[source, FIRST_EDGE] != NONE:
        store.edges[_find(store.edges, source, token), TARGET] = target


@jit_inline
def delete_edge(store: Store, source: int, token: int) -> None:
    states = store.states
    if states[source, FIRST_EDGE] != NONE:
        _take_out(store, _find(store.edges, source, token))
    if states[source, FIRST_EDGE] == NONE:
        states[source, BEST_TOKEN] = NONE
    elif states[source, BEST_TOKEN] == token:
        states[source, BEST_TOKEN] = STALE


@jit_inline
def delete_edges(store: Store, source: int) -> None:
    while store.states[source, FIRST_EDGE] != NONE:
        _take_out(store, store.states[source, FIRST_EDGE])
    store.states[source, BEST_TOKEN] = NONE


@jit
def copy_edges(store: Store, source: int, other: int) -> None:
    """Copy all edges of the automaton state `source` to the state `other`, which must have no edges."""
    edges = store.edges
    _copy_best(store.states, source, other)
    edge = store.states[source, FIRST_EDGE]
    while edge != NONE:
        _insert(store, other, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]


@jit
def move_edges(store: Store, source: int, other: int) -> None:
    """Move all edges of the automaton state `source` to the state `other`, which must have no edges."""
    states, edges = store.states, store.edges
    _copy_best(states, source, other)
    states[source, BEST_TOKEN] = NONE
    while states[source, FIRST_EDGE] != NONE:
        edge = states[source, FIRST_EDGE]
        token, target = edges[edge, TOKEN], edges[edge, TARGET]
        _take_out(store, edge)
        _insert(store, other, token, target)


@jit_inline
def _copy_best(states: np.ndarray, source: int, other: int) -> None:
    states[other, BEST_TOKEN] = states[source, BEST_TOKEN]
    states[other, BEST_TARGET] = states[source, BEST_TARGET]
    states[other, BEST_COUNT] = states[source, BEST_COUNT]


@jit_inline
def count_edge(store: Store, source: int, token: int, target: int) -> None:
    """Update the best edge of the automaton state `source` after the count of `target` grew by one. `target` is the
    state to which `token` leads from `source`."""
    states = store.states
    count, best = states[target, COUNT], states[source, BEST_TOKEN]
    if best == token or (best != STALE and count >= states[source, BEST_COUNT]):
        states[source, BEST_TOKEN], states[source, BEST_TARGET] = token, target
        states[source, BEST_COUNT] = count


@jit_inline
def discount_edge(store: Store, source: int, token: int, target: int) -> None:
    """Update the edges of the automaton state `source` after the count of `target` fell by one. `target` is the state
    to which `token` leads from `source`.

    If the count is now 0, the edge is deleted. If another token may be the most frequent one now, BEST_TOKEN of
    `source` becomes STALE.
    """
    states = store.states
    count = states[target, COUNT]
    if count == 0:
        delete_edge(store, source, token)
    elif states[source, BEST_TOKEN] == token:
        states[source, BEST_COUNT] = count
        # An edge with at least half of the occurrences is the best one for certain.
        if 2 * count < states[source, COUNT] and states[source, FIRST_EDGE] != NONE:
            states[source, BEST_TOKEN] = STALE


@jit_inline
def best_of(store: Store, state: int) -> int:
    """Return the automaton state to which the most frequent next token leads, or NONE if no token follows.

    A STALE best edge is computed again. Afterwards BEST_TOKEN of `state` is the most frequent token and BEST_COUNT its
    count.
    """
    states = store.states
    if states[state, BEST_TOKEN] == STALE:
        states[state, BEST_TOKEN], states[state, BEST_COUNT] = NONE, 0
        edge = states[state, FIRST_EDGE]
        while edge != NONE:
            count_edge(store, state, store.edges[edge, TOKEN], store.edges[edge, TARGET])
            edge = store.edges[edge, NEXT]
    return NONE if states[state, BEST_TOKEN] == NONE else states[state, BEST_TARGET]


@jit_inline
def last_seen_in(store: Store, state: int) -> int:
    """Return the id of the sequence in which a string of this automaton state occurred last, or NONE if the store does
    not record it."""
    return store.book[LAST_SEEN + state] if len(store.book) > LAST_SEEN else NONE


@jit_inline
def mark_last_seen(store: Store, state: int, number: int) -> None:
    if len(store.book) > LAST_SEEN:
        store.book[LAST_SEEN + state] = number


@jit_inline
def _home(edges: np.ndarray, source: int, token: int) -> int:
    """Return the index in the edge hash table where probing for an edge begins, a hash of the edge's source and
    token."""
    mixed = (np.uint64(source) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(len(edges))) >> np.uint64(32))


@jit_inline
def _find(edges: np.ndarray, source: int, token: int) -> int:
    edge = _home(edges, source, token)
    while edges[edge, SOURCE] != NONE:
        if edges[edge, SOURCE] == source and edges[edge, TOKEN] == token:
            return edge
        edge += 1
        if edge == len(edges):
            edge = 0
    return NONE


@jit_inline
def _insert(store: Store, source: int, token: int, target: int) -> None:
    edges, states = store.edges, store.states
    edge = _home(edges, source, token)
    while edges[edge, SOURCE] != NONE:
        edge += 1
        if edge == len(edges):
            edge = 0
    first = states[source, FIRST_EDGE]
    edges[edge, SOURCE] = source
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT] = first
    edges[edge, PREVIOUS] = NONE
    if first != NONE:
        edges[first, PREVIOUS] = edge
    states[source, FIRST_EDGE] = edge
    store.book[NUM_EDGES] += 1


@jit
def _take_out(store: Store, edge: int) -> None:
    """Delete the edge at this index of the edge hash table. Other edges may move to other indices."""
    edges = store.edges
    before, after = edges[edge, PREVIOUS], edges[edge, NEXT]
    if before == NONE:
        store.states[edges[edge, SOURCE], FIRST_EDGE] = after
    else:
        edges[before, NEXT] = after
    if after != NONE:
        edges[after, PREVIOUS] = before
    store.book[NUM_EDGES] -= 1
    size, hole, other = len(edges), edge, edge
    while True:
        other += 1
        if other == size:
            other = 0
        if edges[other, SOURCE] == NONE:
            break
        home = _home(edges, edges[other, SOURCE], edges[other, TOKEN])
        if (other - home) % size >= (other - hole) % size:  # the hole lies between its home and its place
            _move(store, other, hole)
            hole = other
    edges[hole, SOURCE] = NONE


@jit_inline
def _move(store: Store, edge: int, place: int) -> None:
    edges = store.edges
    for column in range(EDGE_WIDTH):
        edges[place, column] = edges[edge, column]
    before, after = edges[edge, PREVIOUS], edges[edge, NEXT]
    if before == NONE:
        store.states[edges[edge, SOURCE], FIRST_EDGE] = place
    else:
        edges[before, NEXT] = place
    if after != NONE:
        edges[after, PREVIOUS] = place


def enlarge(store: Store, most: int | None = None) -> Store:
    """Return a copy of the store with 1.5 times the capacity. States keep their indices; edges do not.

    most: upper limit of the new capacity, in states; None for no limit.
    """
    num_states = len(store.states) * 3 // 2
    if most is not None:
        num_states = min(num_states, most)
    larger = Store.empty(num_states, records_last_seen=len(store.book) > LAST_SEEN)
    larger.states[: len(store.states)] = store.states
    larger.states[:, FIRST_EDGE] = NONE
    larger.book[: len(store.book)] = store.book
    larger.book[NUM_EDGES] = 0
    _copy_edges(store, larger)
    return larger


@jit
def _copy_edges(store: Store, larger: Store) -> None:
    for state in range(store.book[TOP]):
        edge = last = NONE if store.states[state, LENGTH] == NONE else store.states[state, FIRST_EDGE]
        while edge != NONE:
            last = edge
            edge = store.edges[edge, NEXT]
        while last != NONE:  # backwards, since `_insert` prepends: this keeps the order
            _insert(larger, state, store.edges[last, TOKEN], store.edges[last, TARGET])
            last = store.edges[last, PREVIOUS]
