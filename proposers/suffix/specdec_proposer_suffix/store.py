"""Where automata live: states, and the edges between them, in flat arrays that are filled, freed and filled again.

Everything is an index, of a state into `states`, of an edge into `edges`. Most states have a single edge, which is kept
in the state itself, as its best one. All edges of a state that has more are in `edges`, a hash table (open addressing,
linear probing) and a doubly linked list for each state at once. Deleting an edge there moves later ones of its run up,
so there are no tombstones and no slow decay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_proposer_suffix.compiled import compiled, inlined

NONE = -1

# Columns of `states`
LENGTH = 0  # of its longest string, in tokens. A free state: NONE
LINK = 1  # the state of the longest suffix that has other occurrences too. A free state: the next free one
COUNT = 2  # occurrences of each of its strings
FIRST_EDGE = 3  # of its edges in the table; NONE: it has at most one, its best
BEST_TOKEN = 4  # the most frequent next one, of equally frequent ones the last seen (after a removal, any of them);
#                 NONE: there is none; STALE
BEST_TARGET = 5  # where that leads to
BEST_COUNT = 6  # COUNT of BEST_TARGET: whatever changes that comes by here
CHILDREN = 7  # exclusive or of the states whose link this is: tells which, if there is but one
STATE_WIDTH = 8  # half a cache line: what is read together stands together

STALE = -2
"""The best token of a state that occurrences were removed from: to be found again when it is asked for."""

# Columns of `edges`
SOURCE = 0  # NONE: there is no edge here
TOKEN = 1
TARGET = 2
NEXT = 3  # in its state's list, NONE: the last
PREVIOUS = 4  # NONE: the first
EDGE_WIDTH = 5

STATE_BYTES = 4 * (STATE_WIDTH + EDGE_WIDTH + 1)
"""Of a store, per state that it has room for, with a place in the table: source code needs fewer than one."""

ROOT = 0
"""The root of the one automaton in a store that sequences are removed from."""

# Entries of `book`
FREE = 0  # first free state, NONE: none
NUM_STATES = 1  # in use
NUM_EDGES = 2  # in the table
TOP = 3  # states ever used
LAST_SEEN = 4  # from here on, if it is recorded: the number of the sequence that each state was last seen in


class Store(NamedTuple):
    states: np.ndarray  # int32 [state capacity, STATE_WIDTH]
    edges: np.ndarray  # int32 [state capacity, EDGE_WIDTH]
    book: np.ndarray  # int32 [LAST_SEEN]   or with the state capacity in addition

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


@inlined
def has_room(store: Store, num_states: int, num_edges: int) -> bool:
    """Whether as many more fit, with the quarter of the table left free that keeps probing short."""
    return (
        store.book[NUM_STATES] + num_states <= len(store.states)
        and (store.book[NUM_EDGES] + num_edges) * 4 <= len(store.edges) * 3
    )


@inlined
def has_room_for_token(store: Store, limit: int, vocab_size: int) -> bool:
    """Whether one more token fits into an automaton: two states, two edges for each of its suffixes, and copies of
    all edges of another state."""
    return has_room(store, 2, 2 * limit + min(vocab_size, store.book[NUM_EDGES]))


@inlined
def new_state(store: Store, length: int, link: int) -> int:
    """A state without occurrences and edges. There must be room."""
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


@inlined
def free_state(store: Store, state: int) -> None:
    """Its edges must be deleted already."""
    store.states[state, LENGTH] = NONE
    store.states[state, LINK] = store.book[FREE]
    store.book[FREE] = state
    store.book[NUM_STATES] -= 1


@inlined
def target_of(store: Store, source: int, token: int) -> int:
    """The state that token leads to; NONE if there is no edge."""
    if store.states[source, BEST_TOKEN] == token:
        return store.states[source, BEST_TARGET]
    if store.states[source, FIRST_EDGE] == NONE:
        return NONE
    edge = _find(store.edges, source, token)
    return NONE if edge == NONE else store.edges[edge, TARGET]


@inlined
def add_edge(store: Store, source: int, token: int, target: int) -> None:
    """There must be none yet with that token, and room for two."""
    states = store.states
    if states[source, FIRST_EDGE] == NONE:
        if states[source, BEST_TOKEN] == NONE:
            states[source, BEST_TOKEN], states[source, BEST_TARGET] = token, target
            states[source, BEST_COUNT] = states[target, COUNT]
            return
        _insert(store, source, states[source, BEST_TOKEN], states[source, BEST_TARGET])
    _insert(store, source, token, target)


@inlined
def redirect(store: Store, source: int, token: int, target: int) -> None:
    """Let the edge lead to another state."""
    states = store.states
    if states[source, BEST_TOKEN] == token:
        states[source, BEST_TARGET] = target
    if states[source, FIRST_EDGE] != NONE:
        store.edges[_find(store.edges, source, token), TARGET] = target


@inlined
def delete_edge(store: Store, source: int, token: int) -> None:
    states = store.states
    if states[source, FIRST_EDGE] != NONE:
        _take_out(store, _find(store.edges, source, token))
    if states[source, FIRST_EDGE] == NONE:
        states[source, BEST_TOKEN] = NONE
    elif states[source, BEST_TOKEN] == token:
        states[source, BEST_TOKEN] = STALE


@inlined
def delete_edges(store: Store, source: int) -> None:
    while store.states[source, FIRST_EDGE] != NONE:
        _take_out(store, store.states[source, FIRST_EDGE])
    store.states[source, BEST_TOKEN] = NONE


@compiled
def copy_edges(store: Store, source: int, other: int) -> None:
    """Give all edges of source to another state, which has none, as well."""
    edges = store.edges
    _copy_best(store.states, source, other)
    edge = store.states[source, FIRST_EDGE]
    while edge != NONE:
        _insert(store, other, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]


@compiled
def move_edges(store: Store, source: int, other: int) -> None:
    """Give them to a state that has none, and leave source without."""
    states, edges = store.states, store.edges
    _copy_best(states, source, other)
    states[source, BEST_TOKEN] = NONE
    while states[source, FIRST_EDGE] != NONE:
        edge = states[source, FIRST_EDGE]
        token, target = edges[edge, TOKEN], edges[edge, TARGET]
        _take_out(store, edge)
        _insert(store, other, token, target)


@inlined
def _copy_best(states: np.ndarray, source: int, other: int) -> None:
    states[other, BEST_TOKEN] = states[source, BEST_TOKEN]
    states[other, BEST_TARGET] = states[source, BEST_TARGET]
    states[other, BEST_COUNT] = states[source, BEST_COUNT]


@inlined
def count_edge(store: Store, source: int, token: int, target: int) -> None:
    """After the target of one of its edges gained an occurrence: it may be the best now."""
    states = store.states
    count, best = states[target, COUNT], states[source, BEST_TOKEN]
    if best == token or (best != STALE and count >= states[source, BEST_COUNT]):
        states[source, BEST_TOKEN], states[source, BEST_TARGET] = token, target
        states[source, BEST_COUNT] = count


@inlined
def discount_edge(store: Store, source: int, token: int, target: int) -> None:
    """After it lost one: delete the edge if it has none left, and doubt that it is the best."""
    states = store.states
    count = states[target, COUNT]
    if count == 0:
        delete_edge(store, source, token)
    elif states[source, BEST_TOKEN] == token:
        states[source, BEST_COUNT] = count
        # If half of the occurrences go on like this, then nothing can be more frequent.
        if 2 * count < states[source, COUNT] and states[source, FIRST_EDGE] != NONE:
            states[source, BEST_TOKEN] = STALE


@inlined
def best_of(store: Store, state: int) -> int:
    """The state that the most frequent next token leads to; NONE if nothing follows. BEST_TOKEN is that token then,
    BEST_COUNT how often it follows."""
    states = store.states
    if states[state, BEST_TOKEN] == STALE:
        states[state, BEST_TOKEN], states[state, BEST_COUNT] = NONE, 0
        edge = states[state, FIRST_EDGE]
        while edge != NONE:
            count_edge(store, state, store.edges[edge, TOKEN], store.edges[edge, TARGET])
            edge = store.edges[edge, NEXT]
    return NONE if states[state, BEST_TOKEN] == NONE else states[state, BEST_TARGET]


@inlined
def last_seen_in(store: Store, state: int) -> int:
    """The number of a sequence; NONE if that is not recorded."""
    return store.book[LAST_SEEN + state] if len(store.book) > LAST_SEEN else NONE


@inlined
def see(store: Store, state: int, number: int) -> None:
    if len(store.book) > LAST_SEEN:
        store.book[LAST_SEEN + state] = number


@inlined
def _home(edges: np.ndarray, source: int, token: int) -> int:
    """Where the search for an edge begins."""
    mixed = (np.uint64(source) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(len(edges))) >> np.uint64(32))


@inlined
def _find(edges: np.ndarray, source: int, token: int) -> int:
    edge = _home(edges, source, token)
    while edges[edge, SOURCE] != NONE:
        if edges[edge, SOURCE] == source and edges[edge, TOKEN] == token:
            return edge
        edge += 1
        if edge == len(edges):
            edge = 0
    return NONE


@inlined
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


@compiled
def _take_out(store: Store, edge: int) -> None:
    """Delete an edge from the table. Others may move."""
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


@inlined
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


def enlarged(store: Store, most: int | None = None) -> Store:
    """The same content with room for half as many states again, or for `most`, and for edges in proportion. States keep
    their numbers, edges do not."""
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


@compiled
def _copy_edges(store: Store, larger: Store) -> None:
    for state in range(store.book[TOP]):
        edge = last = NONE if store.states[state, LENGTH] == NONE else store.states[state, FIRST_EDGE]
        while edge != NONE:
            last = edge
            edge = store.edges[edge, NEXT]
        while last != NONE:  # from the last one on, since each goes to the front: the order stays
            _insert(larger, state, store.edges[last, TOKEN], store.edges[last, TARGET])
            last = store.edges[last, PREVIOUS]
