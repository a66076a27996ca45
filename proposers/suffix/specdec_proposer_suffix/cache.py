"""A suffix automaton over the outputs of finished and running requests. Eviction limits its size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specdec_proposer_suffix.automaton import NUM_TOKENS, STATE, extend, match, new_root, remove
from specdec_proposer_suffix.store import ROOT, STATE_BYTES, Store, enlarge

SMALLEST = 1024
"""Initial capacity of a store, in states."""

STORE_SHARE = 0.9
"""Share of the memory limit for the automaton. The rest is for the tokens of finished sequences, 4 bytes each."""


def most_states(max_bytes: int) -> int:
    """Return the largest number of automaton states that fit into the memory limit `max_bytes`."""
    return int(max_bytes * STORE_SHARE / STATE_BYTES)


class OutputCache:
    """The cached output sequences of finished and running requests, in one suffix automaton. Newer sequences have
    larger ids.

    While there are more sequences than max_sequences, or more bytes than max_bytes, a finished sequence is evicted: the
    one that finished first or, with is_lru, the one that was drafted from least recently.

    Removing a sequence can make the positions of running sequences outdated. So callers must call `look_up` for each
    running sequence whenever `num_removed` has changed.

    limit: length of the longest strings that the automaton counts, in tokens.
    vocab_size: number of token ids.
    max_sequences: largest number of sequences, running ones included.
    max_bytes: memory limit in bytes; None for no limit.
    is_lru: evict the least recently used sequence instead of the one that finished first.
    """

    def __init__(self, limit: int, vocab_size: int, max_sequences: int, max_bytes: int | None, is_lru: bool) -> None:
        self.limit, self.vocab_size = limit, vocab_size
        self.store = Store.empty(SMALLEST, records_last_seen=is_lru)
        self.num_removed = 0
        self.max_sequences, self._is_lru = max_sequences, is_lru
        self._max_bytes = max_bytes
        self._max_states = None if max_bytes is None else most_states(max_bytes)
        self._num_token_bytes = 0
        self._finished: dict[int, np.ndarray] = {}
        self._num_running = self._next = 0
        new_root(self.store)

    @property
    def sequences(self) -> list[np.ndarray]:
        """The finished sequences, int32 arrays. The one to evict next comes first."""
        return list(self._finished.values())

    @property
    def num_sequences(self) -> int:
        """The number of sequences, running ones included."""
        return len(self._finished) + self._num_running

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes + self._num_token_bytes

    def begin(self) -> int:
        """Register the output sequence of a new request and return the sequence's id. This may evict finished
        sequences."""
        self._num_running += 1
        self._next += 1
        self._remove_surplus()
        return self._next - 1

    def finish(self, number: int, token_ids: np.ndarray) -> None:
        """Mark a running sequence as finished. It stays in the cache until it is evicted.

        number: the sequence's id.
        token_ids: the whole sequence, which must be in the automaton already.
        """
        self._num_running -= 1
        if len(token_ids):
            self._finished[number] = token_ids.astype(np.int32)
            self._num_token_bytes += self._finished[number].nbytes
        self._remove_surplus()

    def drop(self, token_ids: np.ndarray) -> None:
        """Remove a running sequence.

        token_ids: the tokens of the sequence that are in the automaton.
        """
        self._num_running -= 1
        self._remove(token_ids)

    def add(self, token_ids: np.ndarray) -> None:
        """Add a whole sequence as a finished one, while no sequence is running. If the memory limit is reached, the
        rest of its tokens is left out."""
        number, position, removed = self.begin(), np.array([ROOT, 0]), self.num_removed
        token_ids = token_ids.astype(np.int64)
        while not extend(self.store, self.limit, self.vocab_size, position, token_ids[position[NUM_TOKENS] :], number):
            if not self.make_room():
                break
            if self.num_removed > removed:
                self.look_up(position, token_ids)
        self.finish(number, token_ids[: position[NUM_TOKENS]])

    def look_up(self, position: np.ndarray, token_ids: np.ndarray) -> None:
        """Update a running sequence's position in place after another sequence was removed from the automaton.

        token_ids: at least the first position[NUM_TOKENS] tokens of the running sequence.
        """
        num_tokens = position[NUM_TOKENS]
        last = token_ids[max(0, num_tokens - self.limit + 1) : num_tokens].astype(np.int64)
        position[STATE], _ = match(self.store, ROOT, self.limit, last)

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Record that sequences were just drafted from, for LRU eviction.

        numbers: the ids of the sequences. Ids of evicted and running sequences are ignored.
        """
        if self._is_lru:
            for number in numbers:
                if number in self._finished:
                    self._finished[number] = self._finished.pop(number)

    def make_room(self) -> bool:
        """Enlarge the automaton's store or, if the memory limit forbids that, evict a finished sequence. Returns False
        if neither is possible."""
        if self._max_states is None or len(self.store.states) < self._max_states:
            self.store = enlarge(self.store, self._max_states)
            return True
        return self._remove_first()

    def _remove_surplus(self) -> None:
        while self._is_too_much and self._remove_first():
            pass

    @property
    def _is_too_much(self) -> bool:
        if len(self._finished) + self._num_running > self.max_sequences:
            return True
        return self._max_bytes is not None and self.num_bytes > self._max_bytes

    def _remove_first(self) -> bool:
        if not self._finished:
            return False
        token_ids = self._finished.pop(next(iter(self._finished)))
        self._num_token_bytes -= token_ids.nbytes
        self._remove(token_ids)
        return True

    def _remove(self, token_ids: np.ndarray) -> None:
        self.num_removed += (
            1  # before the removal: after an interrupt, positions are looked up once too often, not never
        )
        remove(self.store, self.limit, token_ids.astype(np.int64))
