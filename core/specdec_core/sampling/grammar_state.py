"""How far a request has come in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdec_core.contracts.grammar import GrammarMatcher


class GrammarState:
    """A matcher at the end of a request's output, which visits the nodes of drafts from there.

    make: returns a new matcher. It is called at once, so that a wrong grammar raises its ConfigError here.
    vocab_size: the target's.
    """

    def __init__(self, make: Callable[[], GrammarMatcher], vocab_size: int) -> None:
        self._make, self._vocab_size = make, vocab_size
        self._matcher: GrammarMatcher | None = make()
        self._num_read = 0  # output tokens that the matcher has accepted
        self._below: list[int] = []  # draft tokens that it has accepted after these
        self._error: Exception | None = None  # of `forced`, for the next call of `mask`
        self._last: tuple[list[int], np.ndarray] | None = None  # tokens after the output, and the mask after them

    def mask(self, output: np.ndarray, paths: Sequence[list[int]], masks: np.ndarray) -> dict[int, str]:
        """Write for each path which tokens may follow it. The mask of a path that the grammar refuses stays as it is.

        output: int64 [num_tokens], the request's output so far, which begins with that of earlier calls.
        paths: the draft tokens of each row, from the root's child on.
        masks: int32 [num_paths, num_words], as `GrammarMatcher.fill` has them.

        Returns {index of a path: error message} for paths at which the matcher fails.
        """
        faults: dict[int, str] = {}
        for index, path in enumerate(paths):
            try:
                if self._error is not None:
                    raise self._error
                matcher = self._go_to(output, path)
                if matcher is not None and self._last is not None and self._last[0] == path:
                    masks[index] = self._last[1]
                elif matcher is not None:
                    matcher.fill(masks[index])
            except Exception as error:
                faults[index] = f"structured_outputs cannot be followed: {type(error).__name__}: {error}"
                self._matcher = None
        self._error = None
        return faults

    def forced(self, output: np.ndarray, most: int) -> list[int]:
        """Return the tokens after the output, at most `most`, at each of which the grammar allows one token only: up to
        where the matcher fails, which the next call of `mask` reports.

        output: int64 [num_tokens], as in `mask`.
        """
        found: list[int] = []
        try:
            mask = np.empty(-(-self._vocab_size // 32), dtype=np.int32)
            while len(found) < most and (matcher := self._go_to(output, found)) is not None:
                matcher.fill(mask)
                self._last = list(found), mask.copy()
                token = _only(mask)
                if token is None or token >= self._vocab_size:
                    break
                found.append(token)
        except Exception as error:
            self._error = error
        return found

    def _go_to(self, output: np.ndarray, path: list[int]) -> GrammarMatcher | None:
        """Bring the matcher to the end of a path and return it; None if the grammar refuses a token of the path."""
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._make()
            self._num_read, self._below = 0, []
        new = output[self._num_read :].tolist()
        shared = 0 if new else _num_shared(self._below, path)
        if len(self._below) > shared:
            matcher.rollback(len(self._below) - shared)
            del self._below[shared:]
        if new:
            self._last = None if self._last is None or self._last[0] != new else ([], self._last[1])
        if new and matcher.accept(new) < len(new):
            raise ValueError(f"the output has tokens that it does not allow, among {new}")
        self._num_read = len(output)
        if rest := path[shared:]:
            self._below += rest[: matcher.accept(rest)]
        return matcher if len(self._below) == len(path) else None


def _only(mask: np.ndarray) -> int | None:
    """The only token that a mask (`GrammarMatcher.fill`) allows; None if it allows several."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    bits = int(mask.view(np.uint32)[words[0]])
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two paths share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
