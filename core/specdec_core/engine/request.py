"""One request's state, from submission to its last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from attrs import define

from specdec_core.engine.text import OutputText
from specdec_core.sampling_params import SamplingParams


class Piece(NamedTuple):
    """One output token, the text that became final with it, and whether it is an accepted draft token."""

    token_id: int
    text: str
    is_draft: bool


Listener = Callable[["Request", Sequence[Piece]], None]


@define
class DraftCounts:
    """What speculation did for one request."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per verified draft: 1 + accepted / drafts (1.0 without drafts)."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0


class Request:
    """A `RequestView` for proposers, and the engine's bookkeeping.

    `[0, num_computed)` has committed KV; the tokens from there to `num_tokens` are known but pending, the last being
    the root once only one is left. `max_total_tokens` bounds prompt and output together. Text is decoded as tokens come
    if it is streamed or has stop strings, else once at the end.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        text: OutputText | None = None,
        listener: Listener | None = None,
        is_streamed: bool = False,
    ) -> None:
        self.id = request_id
        self.params = params
        self.seed = seed
        self.num_prompt_tokens = self.num_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.text = text
        self.listener = listener
        self.counts = DraftCounts()
        self.num_computed = 0
        self.is_started = False  # the proposer knows of it
        self.may_draft = True
        self.finish_reason: str | None = None
        self._decodes_as_it_goes = text is not None and (is_streamed or bool(params.stop))
        self._buffer = np.empty(max_total_tokens, dtype=np.int64)
        self._buffer[: self.num_tokens] = prompt_token_ids
        self._readable = self._buffer.view()
        self._readable.flags.writeable = False

    @property
    def token_ids(self) -> np.ndarray:
        return self._readable[: self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        tokens: list[int] = self._buffer[self.num_prompt_tokens : self.num_tokens].tolist()
        return tokens

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed

    def append(self, token_ids: Sequence[int], num_accepted: int, eos_token_ids: frozenset[int]) -> list[Piece]:
        """Take over the tokens up to the first stop, and set finish_reason there. The first num_accepted of them are
        accepted draft tokens. Returns those that were taken."""
        pieces: list[Piece] = []
        stops = frozenset() if self.params.ignore_eos else eos_token_ids
        for token_id in token_ids:
            self._buffer[self.num_tokens] = token_id
            self.num_tokens += 1
            text = self.text.add([token_id]) if self.text is not None and self._decodes_as_it_goes else ""
            if token_id in stops or (self.text is not None and self.text.is_stopped):
                self.finish_reason = "stop"
            elif self.num_tokens == self.max_total_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None and self.text is not None and self._decodes_as_it_goes:
                text += self.text.finish()
            pieces.append(Piece(token_id, text, len(pieces) < num_accepted))
            if self.finish_reason is not None:
                break
        return pieces

    def finish(self, reason: str) -> None:
        """No more tokens will come: `text` becomes the whole of the output's."""
        self.finish_reason = reason
        if self.text is not None:
            if not self._decodes_as_it_goes:
                self.text.add(self.output_token_ids)
            self.text.finish()
