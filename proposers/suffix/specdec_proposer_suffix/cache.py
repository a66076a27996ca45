"""The outputs of earlier requests, and of those that run: one automaton over all of them, bounded by eviction."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specdec_proposer_suffix.automaton import NUM_TOKENS, STATE, extend, match, new_root, remove
from specdec_proposer_suffix.store import ROOT, STATE_BYTES, Store, enlarged

SMALLEST = 1024
"""States that a store has room for at first."""

STORE_SHARE = 0.9
"""Of the memory that may be used. The rest is for the tokens of finished sequences, 4 bytes each."""


def most_states(max_bytes: int) -> int:
    """That there may be room for."""
    return int(max_bytes * STORE_SHARE / STATE_BYTES)


class OutputCache:
    """Sequences have numbers, which rise with their age.

    After one was removed (num_removed tells) the positions of those that run must be looked up again.

    Finished ones are kept, with their tokens, until there are more than max_sequences, running ones included, or no
    more room in max_bytes: then the oldest is removed, or with is_lru the one that has not been of use for longest.
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
        """The finished ones, int32 each, the first to be removed at the front."""
        return list(self._finished.values())

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes + self._num_token_bytes

    def begin(self) -> int:
        """Count a new sequence. Returns its number."""
        self._num_running += 1
        self._next += 1
        self._remove_surplus()
        return self._next - 1

    def finish(self, number: int, token_ids: np.ndarray) -> None:
        """Keep a sequence that ran, all tokens of which are in the automaton."""
        self._num_running -= 1
        if len(token_ids):
            self._finished[number] = token_ids.astype(np.int32)
            self._num_token_bytes += self._finished[number].nbytes
        self._remove_surplus()

    def drop(self, token_ids: np.ndarray) -> None:
        """Forget a sequence that runs, of which token_ids are in the automaton."""
        self._num_running -= 1
        self._remove(token_ids)

    def add(self, token_ids: np.ndarray) -> None:
        """A whole sequence, while none runs. What exceeds all the room that there may be is left out."""
        number, position, removed = self.begin(), np.array([ROOT, 0]), self.num_removed
        token_ids = token_ids.astype(np.int64)
        while not extend(self.store, self.limit, self.vocab_size, position, token_ids[position[NUM_TOKENS] :], number):
            if not self.make_room():
                break
            if self.num_removed > removed:
                self.look_up(position, token_ids)
        self.finish(number, token_ids[: position[NUM_TOKENS]])

    def look_up(self, position: np.ndarray, token_ids: np.ndarray) -> None:
        """Renew a position, of the sequence that begins with token_ids, after another was removed."""
        num_tokens = position[NUM_TOKENS]
        last = token_ids[max(0, num_tokens - self.limit + 1) : num_tokens].astype(np.int64)
        position[STATE], _ = match(self.store, ROOT, self.limit, last)

    def used(self, numbers: Iterable[int]) -> None:
        """Drafts were taken from these sequences, of which some may be gone."""
        if self._is_lru:
            for number in numbers:
                if number in self._finished:
                    self._finished[number] = self._finished.pop(number)

    def make_room(self) -> bool:
        """Enlarge the store, or remove a finished sequence from it. False if neither can be."""
        if self._max_states is None or len(self.store.states) < self._max_states:
            self.store = enlarged(self.store, self._max_states)
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
        self.num_removed += 1  # first, so that an interrupt cannot leave positions that nobody looks up
        remove(self.store, self.limit, token_ids.astype(np.int64))
