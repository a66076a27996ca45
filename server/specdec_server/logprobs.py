"""Logprobs in the shapes that OpenAI's two endpoints give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specdec_core import Logprob

Entry = tuple[int, dict[int, Logprob] | None]
"""A token id and the logprobs at its position; None: the first token of a prompt."""


def chat_logprobs(entries: Iterable[Entry], num_likely: int) -> list[dict[str, Any]]:
    """The entries of a chat's `logprobs.content`.

    num_likely: how many of the likeliest tokens at each position `top_logprobs` has.
    """
    found = []
    for token_id, logprobs in entries:
        assert logprobs is not None, "output tokens have logprobs"
        likely = sorted(logprobs.values(), key=lambda each: -each.logprob)[:num_likely]
        found.append(_described(logprobs[token_id]) | {"top_logprobs": [_described(each) for each in likely]})
    return found


def completion_logprobs(entries: Sequence[Entry], texts: Sequence[str], offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion.

    texts: of the tokens.
    offset: of the first one in the completion's text.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [None if found is None else found[token_id].logprob for token_id, found in entries],
        "top_logprobs": [
            None if found is None else {str(each.decoded_token): each.logprob for each in found.values()}
            for _, found in entries
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(found: Sequence[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """A prompt's logprobs as vLLM's server gives them: for each token null, or {token id: logprob, rank and text}."""
    if found is None:
        return None
    return [
        None
        if each is None
        else {
            str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in each.items()
        }
        for each in found
    ]


def _described(token: Logprob) -> dict[str, Any]:
    text = str(token.decoded_token)
    whole = "\N{REPLACEMENT CHARACTER}" not in text  # else the token is a part of a character
    return {"token": text, "logprob": token.logprob, "bytes": list(text.encode()) if whole else None}
