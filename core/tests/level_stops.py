"""A level budget for tests, which ends each request's draft at a given depth."""

from __future__ import annotations

import numpy as np


class StopsAt:
    """Ends the draft of request i at depth depths[i], 1 or more. Asserts that it is asked about the requests that went
    on, and that `rows` has the index of each token's parent among the tokens that went on."""

    def __init__(self, depths: list[int]) -> None:
        self._depths, self._depth = np.array(depths), 0
        self._going = np.arange(len(depths))  # the request of each token that went on

    def goes_on(
        self, requests: np.ndarray, rows: np.ndarray, probs: np.ndarray, is_first: np.ndarray, num_nodes: np.ndarray
    ) -> np.ndarray:
        assert (self._going[rows] == requests).all()
        self._depth += 1
        goes: np.ndarray = (self._depths > self._depth) & (num_nodes > 0)
        self._going = requests[goes[requests]]
        return goes
