"""Sampling parameters of a request, with vLLM's names and meanings.

To add a parameter, add its field here and change the following files of `specdec_core`:

- if it changes logits: a rule in `sampling/process.py`, or in a file of its own beside it (as `penalties`, `bad_words`,
  `processors`, `grammar`) that is listed there; `sampling/constraints.py` for what is prepared once for a request. If
  drafts are to follow it, as they follow temperature: `contracts/proposer.py`, `engine/drafter.py`,
  `drafting/builder.py`. If a verifier may not support it: `contracts/verifier.py`, `engine/verification.py`. If it may
  forbid a token that a grammar requires: `engine/forced.py`
- if it ends a request: `engine/request.py`, or if it is a length, `engine/engine.py` (`add_request`)
- if it is about text: `engine/detokenizer.py`, `engine/engine.py`; about the number of completions: `api/session.py`
- if it is about logprobs: `sampling/logprobs.py`, `engine/logprobs.py`, `engine/request.py`, `engine/runner.py`,
  `api/outputs.py`
- if it is about drafts: `engine/draft_limits.py`, `engine/scheduler.py`, `engine/observer.py`
- if only an engine can check it: `engine/request_checks.py`; for an option of `spec-decode generate`: `cli/options.py`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, fields_dict, frozen
from attrs.converters import optional

from specdec_core.config.fields import (
    as_float,
    as_whole,
    biases,
    callables,
    flag,
    not_yet,
    number,
    option,
    refuse_unknown,
    strings,
    token_ids,
    token_list,
    whole_number,
)
from specdec_core.config.speculative import MOST_DRAFT_TOKENS
from specdec_core.config.structured_outputs import StructuredOutputs
from specdec_core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

SMALLEST_TEMPERATURE = 1e-5
"""A smaller temperature changes no draw, and dividing by it could overflow."""

MOST_COMPLETIONS = 2**14

LARGEST_REPETITION_PENALTY = 1e6
"""1 / LARGEST_REPETITION_PENALTY is the smallest one; beyond them logits overflow float32."""

LogitsProcessor = Callable[["torch.Tensor", "np.ndarray"], "torch.Tensor"]
"""(logits float [vocab] of one position, token ids int64 [num_tokens] up to it) -> logits float [vocab].

It returns logits of the same dtype. The token ids, of prompt and output, are a read-only array. It
must be pure: the same for the same arguments, whenever and however often it is called, since draft tokens that are
refused later have logits too. Logits of -inf forbid tokens; NaN or +inf fail the request.
"""

T = TypeVar("T")


_whole, _real = partial(option, converter=as_whole), partial(option, converter=as_float)
"""Options that take numbers of any kind."""


def _naming_unknown_keys(cls: type[T]) -> type[T]:
    """Class decorator. An unknown keyword of the constructor raises ConfigError with the nearest known keyword, instead
    of TypeError."""
    init, known = cls.__init__, fields_dict(cls).keys()  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, **keywords: Any) -> None:
        refuse_unknown(keywords, known, cls.__name__)
        init(self, **keywords)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_naming_unknown_keys
@frozen(kw_only=True)
class SamplingParams:
    """How a prompt is completed, and when the completion stops.

    The target's logits are changed by these parameters, in this order:
    allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors, structured_outputs, repetition_penalty,
    frequency_penalty and presence_penalty, temperature, min_p, top_k, top_p. At a draft token, the draft tokens before
    it count as output.
    """

    n: int = _whole(
        whole_number(1, MOST_COMPLETIONS), "Completions of the prompt, each with a seed of its own.", default=1
    )
    temperature: float = _real(
        number(0.0, 100.0),
        "Divides the logits before a token is drawn. 0 and all below 1e-5 are greedy decoding.",
        default=1.0,
    )
    top_p: float = _real(
        number(0.0, 1.0, low_open=True),
        "Sample among the most probable tokens that together have this probability. 1: among all.",
        default=1.0,
    )
    top_k: int = _whole(
        whole_number(-1, 2**31), "Sample among this many of the most probable tokens. 0 or -1: among all.", default=0
    )
    min_p: float = _real(
        number(0.0, 1.0),
        "Sample among tokens at least this many times as probable as the most probable one.",
        default=0.0,
    )
    repetition_penalty: float = _real(
        number(1 / LARGEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY),
        "Divides the positive logits of tokens that prompt or output have, and multiplies their negative ones.",
        default=1.0,
    )
    presence_penalty: float = _real(
        number(-2.0, 2.0), "Subtracted from the logit of every token that the output has.", default=0.0
    )
    frequency_penalty: float = _real(
        number(-2.0, 2.0), "Subtracted from a token's logit once for each time that the output has it.", default=0.0
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "Added to the logits of these tokens.",
        allowed="a dict from token ids to numbers in [-100, 100], or None",
        converter=partial(biases, "logit_bias"),
        hash=False,
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        "Only these tokens may be drawn. None: all may.",
        allowed="token ids, or None",
        converter=optional(partial(token_ids, "allowed_token_ids")),
    )
    bad_words: Sequence[str] = option(
        None,
        "The output never has one of these, with or without spaces before it, as tokens of its own: the last token of "
        "each is forbidden where the output ends with the others. A word inside of a longer token is not found.",
        default=(),
        allowed="a string, or several",
        converter=partial(strings, "bad_words"),
    )
    logits_processors: Sequence[LogitsProcessor] = option(
        None,
        "Pure functions that change the logits of one position, given the token ids up to it.",
        default=(),
        allowed="callables (logits, token_ids) -> logits",
        converter=partial(callables, "logits_processors"),
        hash=False,
    )
    seed: int | None = _whole(
        whole_number(-(2**63), 2**63 - 1, optional=True),
        "Makes a completion reproducible: its text is that of plain decoding with the same seed, unless "
        "draft_sample_method is 'probabilistic'. None: drawn from the engine's seed when the request is submitted.",
    )
    max_tokens: int | None = _whole(
        whole_number(1, 2**31, optional=True),
        "Most tokens of the output. None: as many as the engine's max_model_len leaves room for.",
        default=16,
    )
    min_tokens: int = _whole(
        whole_number(0, 2**31),
        "No end-of-sequence token, stop token or stop string ends a shorter output, in tokens.",
        default=0,
    )
    stop: Sequence[str] = option(
        None,
        "The output ends where its text has one of these.",
        default=(),
        allowed="a string, or several",
        converter=partial(strings, "stop"),
    )
    stop_token_ids: Sequence[int] = option(
        None,
        "The output ends at one of these, or at the model's own end-of-sequence tokens.",
        default=(),
        allowed="token ids, or None",
        converter=lambda value: () if value is None else token_ids("stop_token_ids", value),
    )
    include_stop_str_in_output: bool = option(
        flag, "Keep in the text the string or token that ended the output. The token ids always have it.", default=False
    )
    ignore_eos: bool = option(flag, "Go on after the model's end-of-sequence tokens.", default=False)
    logprobs: int | None = _whole(
        whole_number(-1, 2**31, optional=True),
        "Give the logprobs of each output token and of this many of the most probable ones, by the target's unchanged "
        "logits. -1: of all tokens. None: no logprobs.",
    )
    prompt_logprobs: int | None = _whole(
        whole_number(-1, 2**31, optional=True), "The same as logprobs, for each token of the prompt but its first."
    )
    detokenize: bool = option(flag, "Decode the output to text. False: give its token ids alone.", default=True)
    skip_special_tokens: bool = option(flag, "Leave special tokens out of the text.", default=True)
    num_speculative_tokens: int | None = _whole(
        whole_number(0, MOST_DRAFT_TOKENS, optional=True),
        "Most draft tokens of this request in a step, no more than the engine's number. 0: plain decoding. None: the "
        "engine's number.",
    )
    speculative_methods: Sequence[str] | None = option(
        None,
        "Those of the engine's methods that draft for this request. None: all of them.",
        allowed="a string, several, or None",
        converter=lambda value: None if value is None else strings("speculative_methods", value),
    )
    prediction: str | Sequence[int] | None = option(
        None,
        "What the output is expected to resemble, such as the file that it edits. A method that reads it, such as "
        "`prediction`, drafts from it. The output's distribution does not depend on it.",
        allowed="a string, token ids, or None",
        converter=lambda value: (
            value if value is None or isinstance(value, str) else token_list("prediction", value, "a text or ")
        ),
    )
    structured_outputs: StructuredOutputs | None = option(
        None,
        "What the output has to match, at every token. Needs a plugin such as specdec-grammar.",
        allowed="StructuredOutputs, or a dict of its fields, or None",
        converter=StructuredOutputs.parse,
    )

    # Other parameters of vLLM: only values that change nothing are allowed.
    truncate_prompt_tokens: Any = option(not_yet(None), "Not supported yet.")
    spaces_between_special_tokens: bool = option(not_yet(True), "Not supported yet.", default=True)

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
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError("ignore_eos=True goes on where structured_outputs end the output: leave one of them out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def asks_for_drafts(self) -> bool:
        """Whether any of the engine's methods may draft for the request."""
        return self.num_speculative_tokens != 0 and self.speculative_methods != ()

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of one of the n completions, with n=1. The first completion keeps the seed and computes the
        prompt's logprobs. For the others the seed is mixed with the index."""
        if self.n == 1:
            return self
        if index == 0:
            return evolve(self, n=1)
        seed = None if self.seed is None else mixed_seed(self.seed, index)
        return evolve(self, n=1, seed=seed, prompt_logprobs=None)


def mixed_seed(seed: int, index: int) -> int:
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
