"""Follows an output through its prediction: at which places of the prediction could the output be now?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

IN_STEP = 3
"""After this many tokens that match one place in a row, the output is taken to be there and nowhere else."""

LONGEST_CHANGE = 6
"""The longest change that is made again elsewhere, in tokens before and after it."""

NUM_FOUND = 8
"""Occurrences of a token that are followed, where the output has left the prediction."""


class Alignment:
    """The places in a prediction where a request's output may go on. A place is the index of the predicted token that
    would come next there.

    While the output follows the prediction, there is one place. After a token that differs, there are several: behind
    the token (it replaced the predicted one), at the same place (it was inserted), and behind each occurrence of it
    further on (text before that occurrence was deleted). Each further token confirms some of them.

    A change that the output has made once, such as another name, is expected wherever the prediction has the same
    tokens, until the output leaves them as they are.
    """

    def __init__(self, prediction: np.ndarray) -> None:
        self._prediction = prediction
        self._runs: dict[int, int] = {0: IN_STEP}  # {place: how many tokens in a row matched up to it}
        self._left_at = 0  # where the output was when it last followed the prediction
        self._since: list[int] = []  # output tokens since then
        self._changes: dict[tuple[int, ...], list[int]] = {}  # {predicted tokens: what the output had instead}

    def follow(self, token_ids: Iterable[int]) -> None:
        """Take note of the request's next output tokens."""
        for token_id in token_ids:
            self._follow(token_id)

    def places(self) -> list[tuple[int, int]]:
        """Return [(place, run)], the likeliest place first. run: how many of the newest output tokens match what the
        prediction has before this place; 0 for a guess."""
        ranked = sorted(self._runs.items(), key=lambda each: (-each[1], abs(each[0] - self._left_at)))
        if ranked and ranked[0][1] >= IN_STEP:
            return ranked[:1]
        guesses = [(self._left_at + len(self._since), 0), (self._left_at, 0)]  # replaced, inserted
        sure = [each for each in ranked if each[1] > 1]
        places = dict([*guesses, *ranked])  # a place that was found has its run
        order = [place for place, _ in (*sure, guesses[0], *ranked, guesses[1])]
        return [(place, places[place]) for place in dict.fromkeys(order) if place < len(self._prediction)]

    def expected(self, place: int, number: int) -> list[int]:
        """Return the next tokens at a place, `number` at most: those of the prediction, with the changes so far."""
        found: list[int] = []
        while place < len(self._prediction) and len(found) < number:
            old = self._changed_at(place)
            found += self._changes[old] if old else [int(self._prediction[place])]
            place += len(old) or 1
        return found[:number]

    def _changed_at(self, place: int) -> tuple[int, ...]:
        """The predicted tokens at a place that were changed elsewhere; () if none were."""
        if not self._changes:
            return ()
        ahead = tuple(self._prediction[place : place + LONGEST_CHANGE].tolist())
        lengths = range(len(ahead), 0, -1)
        return next((ahead[:length] for length in lengths if ahead[:length] in self._changes), ())

    def _follow(self, token_id: int) -> None:
        predicted, size = self._prediction, len(self._prediction)
        self._runs = {
            place + 1: run + 1 for place, run in self._runs.items() if place < size and predicted[place] == token_id
        }
        best = max(self._runs, key=self._runs.__getitem__, default=0)
        if self._runs and self._runs[best] >= IN_STEP:
            self._runs = {place: run for place, run in self._runs.items() if run >= IN_STEP}
            self._arrive(best)
            return
        self._since.append(token_id)
        changed = self._changed_at(self._left_at)
        if changed and self._since == self._changes[changed]:
            self._left_at, self._since = self._left_at + len(changed), []
            self._runs = {self._left_at: IN_STEP}
            return
        ahead = (predicted[self._left_at :] == token_id).nonzero()[0][:NUM_FOUND] + self._left_at
        for place in ahead.tolist() or (predicted == token_id).nonzero()[0][-NUM_FOUND:].tolist():
            self._runs.setdefault(place + 1, 1)

    def _arrive(self, place: int) -> None:
        """Take note that the output is in step with the prediction at a place."""
        run = self._runs[place]
        if self._since:
            old = tuple(self._prediction[self._left_at : place - run].tolist())
            new = self._since[: len(self._since) + 1 - run]
            if 0 < len(old) <= LONGEST_CHANGE and 0 < len(new) <= LONGEST_CHANGE:
                self._changes[old] = new
        if self._changes:
            length = min(run, place, LONGEST_CHANGE)
            kept = tuple(self._prediction[place - length : place].tolist())
            for start in range(length):
                self._changes.pop(kept[start:], None)  # here it was not made
        self._left_at, self._since = place, []
