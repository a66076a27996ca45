"""Incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_core.config.sampling import SamplingParams

_CONTEXT = 6
"""Prompt tokens to decode with the output: in some tokenizers a token's text depends on its neighbors."""

_LONGEST_WAIT = 16
"""After this many tokens, text that ends inside a character is final: a character has at most four bytes."""


class OutputText:
    """Detokenizes one request's output, token by token.

    text: the text so far. A stop string and what follows it are cut off (with include_stop_str_in_output, only what
        follows). The bytes of an unfinished character are left out until `finish`.
    stop_string: the stop string that ended the text, or None. A stop string that is complete within the first
        min_tokens tokens does not end the text.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: np.ndarray, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._stop = params.stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0  # of the output
        self._includes_stop = params.include_stop_str_in_output
        # Decoded together: some context, then the tokens that are not yet in `text`.
        self._pending: list[int] = prompt_token_ids[-_CONTEXT:].tolist()
        self._num_context = len(self._pending)
        self._context_text = self._decode(self._pending)
        self._num_given = 0  # characters that `add` has returned
        self._hold_back = 0 if self._includes_stop else max((len(s) - 1 for s in self._stop), default=0)
        self.text = ""
        self.stop_string: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, token_ids: Sequence[int]) -> str:
        """Decode more tokens and return the text that became final. Holds back an unfinished character, and characters
        in which a stop string may have begun."""
        self._pending.extend(token_ids)
        self._num_tokens += len(token_ids)
        text = self._decode(self._pending)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(self._pending) - self._num_context > _LONGEST_WAIT:
            self._take(text)
        return self._give(len(self.text) if self.is_stopped else len(self.text) - self._hold_back)

    def finish(self) -> str:
        """Decode what was held back, since no more tokens will come, and return the text that `add` has not returned
        yet."""
        if not self.is_stopped:
            self._take(self._decode(self._pending))
        return self._give(len(self.text))

    def _give(self, end: int) -> str:
        start, self._num_given = self._num_given, max(self._num_given, end)
        return self.text[start : self._num_given]

    def _take(self, text: str) -> None:
        known = len(self.text)
        self.text += text[len(self._context_text) :]
        self._pending = self._pending[-_CONTEXT:]
        self._num_context = len(self._pending)
        self._context_text = self._decode(self._pending)
        if self._num_tokens <= self._min_tokens:
            return
        found = [(start, s) for s in self._stop if (start := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if found:
            start, self.stop_string = min(found, key=lambda each: (each[0], len(each[1])))
            self.text = self.text[: start + len(self.stop_string) * self._includes_stop]

    def _decode(self, token_ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return decoded
