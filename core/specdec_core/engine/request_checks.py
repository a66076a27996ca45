"""Checks a request before it is queued, so that a wrong one affects no other request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np

from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.grammars import Grammars
from specdec_core.errors import CapacityError, ConfigError
from specdec_core.sampling.bad_words import tokenize_words
from specdec_core.sampling.constraints import Constraints


def parse_prompt(prompt_token_ids: Sequence[int], target: TargetInfo) -> np.ndarray:
    """Check a prompt and return it as int64 [num_tokens]. Raises ConfigError if it is no list of the target's token
    ids, CapacityError if it is too long."""
    if isinstance(prompt_token_ids, Sized) and len(prompt_token_ids) >= target.max_model_len:
        raise CapacityError(
            f"a prompt of {len(prompt_token_ids)} tokens leaves no room for output within max_model_len="
            f"{target.max_model_len}: shorten it, or raise max_model_len if the model allows"
        )
    token_ids = np.empty((0, 0))
    # Lists in lists may stand for billions of values, all of which numpy would write down.
    if not isinstance(prompt_token_ids, list | tuple) or not any(isinstance(x, list | tuple) for x in prompt_token_ids):
        with suppress(Exception):  # a tensor of another device, or whatever a class of the caller's own raises
            token_ids = np.asarray(prompt_token_ids)
    if token_ids.ndim != 1 or token_ids.size == 0 or not _are_whole(prompt_token_ids, token_ids):
        raise ConfigError(f"prompt_token_ids={shown(prompt_token_ids)} is not a list of one or more whole numbers")
    if token_ids.min() < 0 or token_ids.max() >= target.vocab_size:
        outside = token_ids[(token_ids < 0) | (token_ids >= target.vocab_size)]
        raise ConfigError(
            f"prompt token ids {outside[:5].tolist()} are not in the vocabulary: allowed are 0 to "
            f"{target.vocab_size - 1}"
        )
    return token_ids.astype(np.int64)


def parse_prediction(
    prediction: str | Sequence[int] | None, tokenizer: Any, target: TargetInfo, *, is_read: bool
) -> np.ndarray | None:
    """Check a prediction (`SamplingParams.prediction`) and return it as int64 [n]; None if there is none. Raises
    ConfigError if no method of the engine reads it, or for token ids that are not in the vocabulary.

    is_read: whether one of the methods that may draft for the request reads predictions.
    """
    if prediction is None:
        return None
    if not is_read:
        raise ConfigError(
            "prediction is given, and none of the engine's methods that may draft for the request reads it: add one, "
            'as in speculative_config={"method": ["prediction", "ngram"]}, or leave it out'
        )
    token_ids: Sequence[int]
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ConfigError("prediction is text, which needs a tokenizer: give token ids, or a tokenizer")
        _check_text("prediction", prediction)
        token_ids = tokenizer.encode(prediction, add_special_tokens=False)
    else:
        token_ids = prediction
    found = np.array(token_ids, dtype=np.int64)
    _check_ids("prediction with token ids", token_ids, target)
    found.setflags(write=False)
    return found


def check_salt(cache_salt: str) -> None:
    """Raise ConfigError if the salt cannot be encoded as UTF-8."""
    _check_text("cache_salt", cache_salt)


def _check_text(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{name}={shown(text)} has half of a character in it (a surrogate): leave it out")


def _are_whole(given: Sequence[int], array: np.ndarray) -> bool:
    """Whether all values of a prompt are integers, not booleans.

    given: the prompt as the caller gave it.
    array: the prompt converted by numpy. Booleans among numbers have become 0 and 1. If an integer is too large for
        int64, the values are Python objects.
    """
    if array.dtype.kind == "O":
        return all(type(token_id) is int for token_id in array)
    has_truth_values = isinstance(given, list | tuple) and any(isinstance(each, bool | np.bool_) for each in given)
    return array.dtype.kind in "iu" and not has_truth_values


def check_params(
    params: SamplingParams,
    num_speculative_tokens: int,
    methods: Sequence[str],
    target: TargetInfo,
    *,
    has_text: bool,
) -> None:
    """Raise ConfigError if this engine cannot serve a request with these parameters.

    num_speculative_tokens: the engine's setting, 0 without speculation. methods: the names of its methods.
    has_text: whether the engine has a tokenizer.
    """
    if params.n != 1:
        raise ConfigError(f"n={params.n}: a request is one completion. Submit one with each params.of_sample(index)")
    if params.stop and not has_text:
        raise ConfigError(f"stop={shown(params.stop)} needs text: leave out skip_tokenizer_init=True")
    if params.bad_words and not has_text:
        raise ConfigError(f"bad_words={shown(params.bad_words)} need a tokenizer: leave out skip_tokenizer_init=True")
    _check_ids("stop_token_ids", params.stop_token_ids, target)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), target)
    _check_ids("logit_bias for token ids", params.logit_bias or (), target)
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number is not None and number > target.vocab_size:
            raise ConfigError(
                f"{name}={number} is more than the {target.vocab_size} tokens of the vocabulary: lower it, or give -1 "
                f"for all"
            )
    asked = params.num_speculative_tokens
    if asked and not num_speculative_tokens:
        raise ConfigError(f"num_speculative_tokens={asked} of a request needs an engine with a speculative_config")
    if asked is not None and asked > num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens={asked} of a request exceeds the engine's {num_speculative_tokens}: lower it, or "
            f"raise the number in speculative_config"
        )
    for name in params.speculative_methods or ():
        if name not in methods:
            raise ConfigError(
                f"speculative_methods of a request has {shown(name)}, and the engine's methods are "
                f"{', '.join(map(repr, methods)) or 'none'}: name some of these, or leave it out for all"
            )


def make_constraints(
    params: SamplingParams, tokenizer: Any, eos_token_ids: frozenset[int], target: TargetInfo, grammars: Grammars
) -> Constraints | None:
    """Turn sampling parameters such as bad_words and logit_bias into constraints on logits. Returns None if no
    parameter needs one. Raises ConfigError if bad_words has tokens that are not in the vocabulary, if the parameters
    allow no token, or for structured_outputs that nothing can compile.

    params: passed `check_params`.
    """
    words = tokenize_words(params.bad_words, tokenizer)
    _check_ids("bad_words with token ids", [token_id for word in words for token_id in word], target)
    # A checkpoint may name an end-of-sequence token that its vocabulary does not have.
    ends = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < target.vocab_size)
    wanted = params.structured_outputs
    constraints = Constraints.of(params, words, ends, None if wanted is None else grammars.start(wanted))
    if constraints is not None:
        _check_that_some_token_is_left(constraints, target)
    return constraints


def _check_that_some_token_is_left(constraints: Constraints, target: TargetInfo) -> None:
    """Raise ConfigError if the constraints allow no first token, whatever the logits are."""
    is_left = np.ones(target.vocab_size, dtype=bool)
    if constraints.allowed_ids is not None:
        is_left[:] = False
        is_left[constraints.allowed_ids] = True
    if constraints.bad_words is not None:
        is_left[constraints.bad_words.single_ids] = False
    if not is_left.any():
        raise ConfigError("bad_words forbid all that allowed_token_ids leave: allow more tokens, or forbid fewer words")
    is_left[constraints.end_ids] = False
    if constraints.min_tokens and not is_left.any():
        raise ConfigError(
            f"min_tokens={constraints.min_tokens}, but every token that allowed_token_ids and bad_words leave ends the "
            f"output: allow more tokens, or give min_tokens=0"
        )


def _check_ids(what: str, token_ids: Iterable[int], target: TargetInfo) -> None:
    outside = [token_id for token_id in token_ids if token_id >= target.vocab_size]
    if outside:
        raise ConfigError(
            f"{what} {shown(outside[:5])} are not in the vocabulary: allowed are 0 to {target.vocab_size - 1}"
        )
