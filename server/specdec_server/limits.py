"""What one request may ask for: the engine has no such limits, and a small body could keep it busy for minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core import ConfigError, SamplingParams
from specdec_server.errors import ApiError

MOST_COMPLETIONS = 128
"""n of a request, as OpenAI's API has it."""
MOST_TEXTS, LONGEST_TEXT = 1000, 1000
"""Entries of a list of texts (stop, bad_words, the choices of structured_outputs), and characters of each."""
MOST_LOGPROBS_OF_ANSWER = 2**20
"""Logprobs of an answer: each takes half a kilobyte until it is sent."""


def check_params(params: SamplingParams, num_prompts: int, max_model_len: int) -> None:
    """Raise ConfigError, whose message begins with the field's name, if the parameters ask for too much."""
    if params.n > MOST_COMPLETIONS:
        raise ConfigError(f"n={params.n} is more than {MOST_COMPLETIONS}: send several requests")
    grammar = params.structured_outputs
    lists: Mapping[str, Sequence[str]] = {
        "stop": [params.stop] if isinstance(params.stop, str) else params.stop or (),
        "bad_words": params.bad_words or (),
        "structured_outputs": () if grammar is None else grammar.choice or (),
    }
    for name, texts in lists.items():
        if len(texts) > MOST_TEXTS or any(len(each) > LONGEST_TEXT for each in texts):
            raise ConfigError(
                f"{name} has {len(texts)} texts of up to {max(map(len, texts))} characters: give {MOST_TEXTS} at most, "
                f"of up to {LONGEST_TEXT}"
            )
    if params.logprobs is not None:
        num_tokens = num_prompts * params.n * min(params.max_tokens or max_model_len, max_model_len)
        if num_tokens * (1 + params.logprobs) > MOST_LOGPROBS_OF_ANSWER:
            raise ConfigError(
                f"logprobs of up to {num_tokens} tokens, {1 + params.logprobs} of each, make too large an answer: "
                f"lower max_tokens, n or logprobs, or send several requests"
            )


def check_prompts(params: SamplingParams, num_tokens: int) -> None:
    """Raise ConfigError if the logprobs of prompts of so many tokens together make too large an answer."""
    if params.prompt_logprobs is not None and num_tokens * (1 + params.prompt_logprobs) > MOST_LOGPROBS_OF_ANSWER:
        raise ConfigError(
            f"prompt_logprobs of {num_tokens} tokens, {1 + params.prompt_logprobs} of each, make too large an answer: "
            f"lower it, or send several requests"
        )


class LongestText:
    """Refuses texts that have more tokens than a prompt may have, before they are tokenized.

    tokenizer: None: texts are not tokenized at all.
    most_tokens: of a prompt.
    """

    def __init__(self, tokenizer: Any, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        vocabulary = () if tokenizer is None else tokenizer.get_vocab()
        self._most_characters = most_tokens * max(map(len, vocabulary), default=1)

    def check(self, texts: Any) -> None:
        """Raise ApiError for texts, in lists and mappings, that together are too long."""
        length = _length(texts)
        if length > self._most_characters:
            raise ApiError(
                400,
                f"the prompt has {length} characters, more than {self._most_tokens} tokens can have: shorten it",
                code="context_length_exceeded",
            )


def _length(texts: Any) -> int:
    if isinstance(texts, str):
        return len(texts)
    parts = texts.values() if isinstance(texts, Mapping) else texts if isinstance(texts, list | tuple) else ()
    return sum(map(_length, parts))
