"""What a request asks of sampling, with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import Attribute, evolve, field, fields, frozen

from specdec_core.config import MOST_DRAFT_TOKENS, unknown_key
from specdec_core.converters import as_float, as_whole, biases, callables, strings, token_ids
from specdec_core.errors import ConfigError
from specdec_core.validators import flag, is_number, number, shown, whole_number

if TYPE_CHECKING:
    import numpy as np
    import torch

SMALLEST_TEMPERATURE = 1e-5
"""Below it, dividing by the temperature would overflow long before it changed what is drawn."""

MOST_COMPLETIONS = 2**14

LARGEST_REPETITION_PENALTY = 1e6
"""And one over it is the smallest: what is beyond leaves float32."""

LogitsProcessor = Callable[["torch.Tensor", "np.ndarray"], "torch.Tensor"]
"""(logits float [vocab] of one position, token ids int64 [num_tokens] up to it) -> logits float [vocab]."""

T = TypeVar("T")


def _logit_bias(value: Any) -> dict[int, float] | None:
    return biases("logit_bias", value)


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else token_ids("allowed_token_ids", value)


def _bad_words(value: Any) -> tuple[str, ...]:
    return strings("bad_words", value)


def _logits_processors(value: Any) -> tuple[LogitsProcessor, ...]:
    return callables("logits_processors", value)


def _stop(value: Any) -> tuple[str, ...]:
    return strings("stop", value)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else token_ids("stop_token_ids", value)


def _not_yet(instance: SamplingParams, attribute: Attribute[Any], value: Any) -> None:
    if value is not attribute.default and not (is_number(value) and value == attribute.default):
        raise ConfigError(
            f"{attribute.name}={shown(value)} is not supported yet: leave it out, or give {attribute.default}"
        )


def _naming_unknown_keys(cls: type[T]) -> type[T]:
    """An unknown keyword raises ConfigError, with the nearest one, where Python would raise TypeError."""
    init = cls.__init__
    known = {attribute.name for attribute in fields(cls)}  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, **keywords: Any) -> None:
        for key in keywords:
            if key not in known:
                raise unknown_key(key, known, cls.__name__)
        init(self, **keywords)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_naming_unknown_keys
@frozen(kw_only=True)
class SamplingParams:
    """How one prompt is completed and when a completion stops.

    n: how many completions. temperature 0 is greedy, and so is any below 1e-5. top_k 0 or -1 and top_p 1 keep every
    token. seed None: drawn once at submission. A completion ends at the end-of-sequence token unless ignore_eos, at
    one of stop_token_ids, and where one of the stop strings is complete. The text leaves out what it stopped at unless
    include_stop_str_in_output; the token ids never do. detokenize False: token ids only.

    Before a token is drawn, the target's logits are changed in this order, at every draft token with its own history:
    allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors, repetition_penalty, frequency_penalty and
    presence_penalty, temperature, min_p, top_k, top_p. min_tokens: no end of sequence (unless ignore_eos), stop token
    or stop string before so many. bad_words: as text, with and without a space before it; looked for in the output.
    repetition_penalty is for tokens of prompt and output, the other penalties for those of the output.

    logits_processors: callables (logits [vocab], token_ids) -> logits [vocab] of the same dtype. token_ids is a
    read-only int64 numpy array, prompt and all that follows it. They must be pure: the same for the same arguments,
    whenever and however often they are asked. Logits of -inf forbid tokens; NaN or +inf fail the request.

    logprobs: how many of the likeliest tokens to give for each output token, besides itself, with their logarithmic
    probabilities under the target's unchanged logits; -1: all. prompt_logprobs: the same for the prompt's.

    num_speculative_tokens overrides the engine's number for this request (0: no speculation); it cannot exceed it.
    """

    n: int = field(default=1, converter=as_whole, validator=whole_number(1, MOST_COMPLETIONS))
    temperature: float = field(default=1.0, converter=as_float, validator=number(0.0, 100.0))
    top_p: float = field(default=1.0, converter=as_float, validator=number(0.0, 1.0, low_open=True))
    top_k: int = field(default=0, converter=as_whole, validator=whole_number(-1, 2**31))
    min_p: float = field(default=0.0, converter=as_float, validator=number(0.0, 1.0))
    repetition_penalty: float = field(
        default=1.0, converter=as_float, validator=number(1 / LARGEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY)
    )
    presence_penalty: float = field(default=0.0, converter=as_float, validator=number(-2.0, 2.0))
    frequency_penalty: float = field(default=0.0, converter=as_float, validator=number(-2.0, 2.0))
    logit_bias: dict[int, float] | None = field(default=None, converter=_logit_bias, hash=False)
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_allowed_token_ids)
    bad_words: tuple[str, ...] = field(default=None, converter=_bad_words)
    logits_processors: tuple[LogitsProcessor, ...] = field(default=None, converter=_logits_processors, hash=False)
    seed: int | None = field(
        default=None, converter=as_whole, validator=whole_number(-(2**63), 2**63 - 1, optional=True)
    )
    max_tokens: int | None = field(default=16, converter=as_whole, validator=whole_number(1, 2**31, optional=True))
    min_tokens: int = field(default=0, converter=as_whole, validator=whole_number(0, 2**31))
    stop: tuple[str, ...] = field(default=None, converter=_stop)
    stop_token_ids: tuple[int, ...] = field(default=None, converter=_stop_token_ids)
    include_stop_str_in_output: bool = field(default=False, validator=flag)
    ignore_eos: bool = field(default=False, validator=flag)
    logprobs: int | None = field(default=None, converter=as_whole, validator=whole_number(-1, 2**31, optional=True))
    prompt_logprobs: int | None = field(
        default=None, converter=as_whole, validator=whole_number(-1, 2**31, optional=True)
    )
    detokenize: bool = field(default=True, validator=flag)
    skip_special_tokens: bool = field(default=True, validator=flag)
    num_speculative_tokens: int | None = field(
        default=None, converter=as_whole, validator=whole_number(0, MOST_DRAFT_TOKENS, optional=True)
    )

    # What vLLM's users may pass besides: only the value that changes nothing is accepted.
    structured_outputs: Any = field(default=None, validator=_not_yet)
    truncate_prompt_tokens: Any = field(default=None, validator=_not_yet)
    spaces_between_special_tokens: bool = field(default=True, validator=_not_yet)

    def __attrs_post_init__(self) -> None:
        if self.stop and not self.detokenize:
            raise ConfigError(f"stop={list(self.stop)} is looked for in the text: leave out detokenize=False")
        if self.n > 1 and self.is_greedy:
            raise ConfigError(
                f"n={self.n} completions at temperature={self.temperature} would all be the same: give n=1, or a "
                f"higher temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it, or raise max_tokens"
            )
        if self.allowed_token_ids == ():
            raise ConfigError("allowed_token_ids=[] allows no token at all: name some, or leave it out for all of them")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of one of the n completions. The seed is mixed with its index; the first one keeps it, and is
        the one that computes the prompt's logprobs."""
        if self.n == 1:
            return self
        if index == 0:
            return evolve(self, n=1)
        seed = None if self.seed is None else mixed_seed(self.seed, index)
        return evolve(self, n=1, seed=seed, prompt_logprobs=None)


def mixed_seed(seed: int, index: int) -> int:
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
