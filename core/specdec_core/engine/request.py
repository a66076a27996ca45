"""One request's state, from submission to its last token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from specdec_core.config.sampling import SamplingParams
from specdec_core.engine.detokenizer import OutputText
from specdec_core.engine.metrics import DraftCounts
from specdec_core.sampling.constraints import Constraints
from specdec_core.sampling.logprobs import TokenLogprobs


class Piece(NamedTuple):
    """One output token.

    text: the text that became final with this token.
    is_draft: whether it is an accepted draft token.
    logprobs: None unless the sampling parameters ask for logprobs.
    methods: the methods that have drafted it, if it is an accepted draft token. Of several methods on a GPU, it is not
        known which they are.
    """

    token_id: int
    text: str
    is_draft: bool
    logprobs: TokenLogprobs | None = None
    methods: tuple[str, ...] = ()


Listener = Callable[["Request", Sequence[Piece]], None]


class Request:
    """A request as proposers see it (`RequestView`), and the engine's bookkeeping.

    num_computed: the number of tokens, from the first on, whose final keys and values are in the KV cache.
    num_cached_tokens: the number of tokens whose keys and values came from the prefix cache.
    num_tokens: the number of prompt and output tokens. Those from index num_computed on are pending. A single pending
        token is the root of the next draft.
    max_total_tokens: the limit of num_tokens.
    text: the output's text. It is decoded token by token if it is streamed or if there are stop strings, else once at
        the end.
    logprobs, prompt_logprobs: None unless the sampling parameters ask for them. A prompt's first token has no logprob.
    error: the message for finish_reason "error"; else None.
    draft_turn: draft tokens that do not divide evenly go to the requests with the lowest numbers.
    arrived_s, last_token_s: when it was submitted, and when it last got output tokens (None: not yet), in seconds of
        `perf_counter`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        constraints: Constraints | None = None,
        text: OutputText | None = None,
        is_streamed: bool = False,
        is_lossless: bool = True,
        cache_salt: str = "",
        prediction: np.ndarray | None = None,
    ) -> None:
        self.id = request_id
        self.params = params
        self.seed = seed
        self.num_prompt_tokens = self.num_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.constraints = constraints
        self.text = text
        self.is_lossless = is_lossless  # whether its tokens have the target's distribution
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.counts = DraftCounts()
        self.cache_salt = cache_salt
        self.prediction = np.empty(0, dtype=np.int64) if prediction is None else prediction
        self.num_cached_tokens = self.num_computed = 0
        self.num_streamed = 0  # characters of its text that pieces have carried
        self.is_started = False  # the proposer knows of it
        self.may_draft = True
        self.draft_turn = 0
        self.arrived_s = perf_counter()
        self.last_token_s: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or token id that ended it; None: anything else
        self.error: str | None = None
        self._decodes_as_it_goes = text is not None and (is_streamed or bool(params.stop))
        self._text_is_complete = False
        self.last_token_id = int(prompt_token_ids[-1])
        self._buffer = np.empty(max_total_tokens, dtype=np.int64)
        self._buffer[: self.num_tokens] = prompt_token_ids
        self._readable = self._buffer.view()
        self._readable.flags.writeable = False

    @property
    def token_ids(self) -> np.ndarray:
        return self._readable[: self.num_tokens]

    @property
    def reusable_token_ids(self) -> np.ndarray:
        """The tokens whose keys and values may come from the prefix cache, int64 [n]: all tokens of the request, or
        none. The prefix cache is not used if prompt logprobs need every token's logits, or if the request's logits were
        not finite before."""
        is_free = self.prompt_logprobs is None and self.may_draft
        return self.token_ids if is_free else self.token_ids[:0]

    @property
    def may_sample(self) -> bool:
        """Whether draft tokens may be drawn where the user leaves that open (`draft_sample_method`)."""
        return self.params.seed is None and not self.params.is_greedy

    def may_use(self, method: str) -> bool:
        """Whether the request's parameters let this method draft for it."""
        methods = self.params.speculative_methods
        return self.params.asks_for_drafts and (methods is None or method in methods)

    @property
    def output_token_ids(self) -> list[int]:
        tokens: list[int] = self._buffer[self.num_prompt_tokens : self.num_tokens].tolist()
        return tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the output tokens' logprobs; None unless the sampling parameters ask for logprobs."""
        if self.logprobs is None:
            return None
        return sum(each[token].logprob for each, token in zip(self.logprobs, self.output_token_ids, strict=True))

    @property
    def rest(self) -> str:
        """The text that the detokenizer still held back when an error or an abort ended the request; else "". No piece
        has this text."""
        return "" if self.finish_reason is None or self.text is None else self.text.text[self.num_streamed :]

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the only pending token is an output token, which is then the root of the next draft."""
        return self.num_pending == 1 and self.num_computed >= self.num_prompt_tokens

    def append(
        self,
        token_ids: Sequence[int],
        num_accepted: int,
        eos_token_ids: frozenset[int],
        logprobs: Sequence[TokenLogprobs] = (),
        accepted_by: Mapping[str, int] = MappingProxyType({}),
    ) -> list[Piece]:
        """Append tokens up to the first stop, set finish_reason there, and return the appended tokens as pieces.

        num_accepted: how many of the tokens are accepted draft tokens; these come first.
        logprobs: one entry per token, if the sampling parameters ask for logprobs; else empty.
        accepted_by: {method: how many of the first accepted draft tokens the method has drafted}.
        """
        pieces: list[Piece] = []
        for token_id in token_ids:
            self._buffer[self.num_tokens] = token_id
            self.num_tokens += 1
            self.last_token_id = token_id
            self._check_token(token_id, eos_token_ids)
            own = None
            if self.logprobs is not None:
                own = logprobs[len(pieces)]
                self.logprobs.append(own)
            number = len(pieces)
            methods = tuple(method for method, most in accepted_by.items() if number < most)
            pieces.append(Piece(token_id, self._text_of(token_id), number < num_accepted, own, methods))
            if self.finish_reason is not None:
                break
        return pieces

    def _check_token(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Set finish_reason if the newest token ends the output. Stop strings are not checked here."""
        if token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_tokens == self.max_total_tokens:
            self.finish_reason = "length"

    def _text_of(self, token_id: int) -> str:
        """Decode the newest token and return the text that became final; "" if the text is decoded only at the
        request's end. A stop string in the text ends the request."""
        if self.text is None or not self._decodes_as_it_goes:
            return ""
        text = "" if self._is_left_out else self.text.add([token_id])
        if self.finish_reason is not None:
            text += self.text.finish()  # what it held back may have a stop string in it
        if self.text.is_stopped:
            self.finish_reason, self.stop_reason = "stop", self.text.stop_string
        return text

    @property
    def _is_left_out(self) -> bool:
        """Whether the newest token is a stop token that does not become part of the text."""
        return self.finish_reason == "stop" and not self.params.include_stop_str_in_output

    def finish(self, reason: str) -> None:
        """Set finish_reason and complete `text`, as no more tokens will come. A second call does nothing."""
        self.finish_reason = reason
        if self.text is not None and not self._text_is_complete:
            self._text_is_complete = True
            if not self._decodes_as_it_goes:
                self.text.add(self.output_token_ids[: -1 if self._is_left_out else None])
            self.text.finish()
