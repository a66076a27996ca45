"""String counts for the reference implementation, if the token sequences are too long to count every string in
advance."""

from __future__ import annotations

from collections import Counter

import numpy as np
from attrs import define, field
from suffix_reference import String, Tree

END = -1  # of a sequence


@define
class ScannedTree(Tree):
    """Counts a string only when asked, by searching all sequences for it. Only the newest sequence may grow."""

    _text: np.ndarray = field(factory=lambda: np.full(1024, END, dtype=np.int64))  # sequences, an END after each
    _num_tokens: int = 0
    _newest: list[int] | None = None
    _ends: dict[String, np.ndarray] = field(factory=dict)  # string -> where it was found to end, until the next append

    def append(self, sequence: list[int], token_id: int) -> None:
        if sequence is not self._newest:
            if sequence:
                raise ValueError("this sequence is not the newest, so it cannot grow")
            self._newest = sequence
            self._num_tokens += 1  # past an END
        if self._num_tokens + 1 >= len(self._text):
            self._text = np.concatenate([self._text, np.full_like(self._text, END)])
        sequence.append(token_id)
        self._text[self._num_tokens] = token_id
        self._num_tokens += 1
        self._ends.clear()

    def remove(self, sequence: list[int]) -> None:
        raise NotImplementedError("nothing is evicted here")

    def count(self, string: String) -> int:
        return len(self._ends_of(string))

    def counts_after(self, string: String) -> Counter[int]:
        counts = Counter(self._text[self._ends_of(string)].tolist())
        del counts[END]
        return counts

    def _ends_of(self, string: String) -> np.ndarray:
        if string not in self._ends:
            last = self._ends_of(string[:-1]) if len(string) > 1 else np.arange(self._num_tokens)
            self._ends[string] = last[self._text[last] == string[-1]] + 1
        return self._ends[string]
