"""What a request asks of sampling, with vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import wraps
from hashlib import blake2b
from typing import Any, TypeVar

from attrs import Attribute, evolve, field, fields, frozen

from specdec_core.config import MOST_DRAFT_TOKENS, unknown_key
from specdec_core.errors import ConfigError
from specdec_core.validators import flag, is_number, number, whole_number

SMALLEST_TEMPERATURE = 1e-5
"""Below it, dividing by the temperature would overflow long before it changed what is drawn."""

MOST_COMPLETIONS = 2**14

T = TypeVar("T")


def _float(value: Any) -> Any:
    """Any kind of number, numpy's too, as Python's own. What is none, or too large, is left to the validator."""
    with suppress(OverflowError):
        return float(value) if is_number(value) else value
    return value


def _whole(value: Any) -> Any:
    return int(value) if is_number(value) and value == value // 1 else value


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if any(not isinstance(s, str) or not s for s in stops):
        raise ConfigError(f"stop={value!r} must be a non-empty string or a list of them")
    return stops


def _token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    token_ids = tuple(map(_whole, value)) if isinstance(value, Iterable) else (value,)
    if not isinstance(value, Iterable) or any(type(token_id) is not int or token_id < 0 for token_id in token_ids):
        raise ConfigError(f"stop_token_ids={value!r} must be a list of token ids: integers from 0 on")
    return token_ids


def _not_yet(instance: SamplingParams, attribute: Attribute[Any], value: Any) -> None:
    if value is not attribute.default and not (is_number(value) and value == attribute.default):
        raise ConfigError(f"{attribute.name}={value!r} is not supported yet: leave it out, or give {attribute.default}")


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

    num_speculative_tokens overrides the engine's number for this request (0: no speculation); it cannot exceed it.
    """

    n: int = field(default=1, converter=_whole, validator=whole_number(1, MOST_COMPLETIONS))
    temperature: float = field(default=1.0, converter=_float, validator=number(0.0, 100.0))
    top_p: float = field(default=1.0, converter=_float, validator=number(0.0, 1.0, low_open=True))
    top_k: int = field(default=0, converter=_whole, validator=whole_number(-1, 2**31))
    seed: int | None = field(default=None, converter=_whole, validator=whole_number(-(2**63), 2**63 - 1, optional=True))
    max_tokens: int | None = field(default=16, converter=_whole, validator=whole_number(1, 2**31, optional=True))
    stop: tuple[str, ...] = field(default=None, converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=None, converter=_token_ids)
    include_stop_str_in_output: bool = field(default=False, validator=flag)
    ignore_eos: bool = field(default=False, validator=flag)
    detokenize: bool = field(default=True, validator=flag)
    skip_special_tokens: bool = field(default=True, validator=flag)
    num_speculative_tokens: int | None = field(
        default=None, converter=_whole, validator=whole_number(0, MOST_DRAFT_TOKENS, optional=True)
    )

    # What vLLM's users may pass besides: only the value that changes nothing is accepted.
    min_p: float = field(default=0.0, validator=_not_yet)
    presence_penalty: float = field(default=0.0, validator=_not_yet)
    frequency_penalty: float = field(default=0.0, validator=_not_yet)
    repetition_penalty: float = field(default=1.0, validator=_not_yet)
    min_tokens: int = field(default=0, validator=_not_yet)
    logit_bias: Any = field(default=None, validator=_not_yet)
    allowed_token_ids: Any = field(default=None, validator=_not_yet)
    bad_words: Any = field(default=None, validator=_not_yet)
    logprobs: Any = field(default=None, validator=_not_yet)
    prompt_logprobs: Any = field(default=None, validator=_not_yet)
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

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of one of the n completions. The seed is mixed with its index; the first one keeps it."""
        if self.n == 1:
            return self
        return evolve(self, n=1, seed=mixed_seed(self.seed, index) if self.seed is not None and index else self.seed)


def mixed_seed(seed: int, index: int) -> int:
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
