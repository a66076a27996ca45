"""The fields that clients send and that change nothing here, each with the reason. Values that ask for something are
refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from specdec_core import must, one_of, option, text
from specdec_core.config.fields import not_yet

_of_names = must(
    lambda value: isinstance(value, Mapping), "must be an object of names and values", "an object", optional=True
)


@frozen(kw_only=True, slots=False)  # a class of fields may inherit several of these
class IdleFields:
    """Fields of both endpoints that change nothing."""

    user: str | None = option(text(optional=True), "Names the client's user; nothing is kept by user.")
    safety_identifier: str | None = option(text(optional=True), "Names the client's user; nothing is kept by user.")
    prompt_cache_key: str | None = option(text(optional=True), "A hint about shared prefixes, which are found without.")
    metadata: Mapping[str, Any] | None = option(_of_names, "Kept with stored answers, and none are stored.")
    store: bool = option(one_of(False), "Answers are not stored.", default=False)
    service_tier: str = option(one_of("auto", "default"), "There is one tier.", default="auto")
    priority: int = option(one_of(0), "Requests run first come, first served.", default=0)
    best_of: int = option(one_of(1), "All n completions are returned.", default=1)
    use_beam_search: bool = option(one_of(False), "Tokens are sampled.", default=False)
    length_penalty: float = option(not_yet(1.0), "It is for beam search.", default=1.0)


@frozen(kw_only=True, slots=False)  # a class of fields may inherit several of these
class IdleChatFields:
    """Fields of chats that change nothing."""

    parallel_tool_calls: bool = option(one_of(True), "The model decides how many tools it calls.", default=True)
    modalities: Any = option(must(lambda value: value == ["text"], "must be ['text']: models here write text only",
                                  "['text']", optional=True), "Models write text.")  # fmt: skip
