"""OpenAI's field `prediction` (Predicted Outputs): text that the answer is expected to resemble, from which the method
`prediction` drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from specdec_core import ConfigError, Piece, SamplingParams, shown

METHOD = "prediction"
FORM = "{'type': 'content', 'content': text, or a list of {'type': 'text', 'text': ...}}"


def parse_prediction(value: Any) -> str | None:
    """Read the field's value. Raises ConfigError, whose message begins with the field's name."""
    if value is None:
        return None
    content = value.get("content") if isinstance(value, Mapping) and value.get("type") == "content" else None
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ConfigError(f"prediction={shown(value)} must be {FORM}")
    return "".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ConfigError(f"prediction has the part {shown(part)}: give {FORM}")
    return text


def tokenized(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The same parameters, with the prediction as token ids. A long one takes a while. Raises ConfigError for text that
    cannot be encoded."""
    text = params.prediction
    if not isinstance(text, str) or tokenizer is None:
        return params
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"prediction={shown(text)} has half of a pair of surrogates in it: leave it out")
    return evolve(params, prediction=tokenizer.encode(text, add_special_tokens=False))


def prediction_usage(params: SamplingParams, pieces: Iterable[Piece]) -> dict[str, Any]:
    """What `usage` has of a prediction. Its tokens that became output are accepted, all others are rejected.

    params: those of `tokenized`. pieces: the tokens of all completions.
    """
    if params.prediction is None:
        return {}
    num_accepted = sum(METHOD in piece.methods for piece in pieces)
    return {
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": max(0, params.n * len(params.prediction) - num_accepted),
        }
    }
