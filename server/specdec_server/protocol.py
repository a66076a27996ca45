"""Turns bodies of requests into checked fields and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from attrs import fields_dict, frozen

from specdec_core import (
    Check,
    ConfigError,
    SamplingParams,
    StructuredOutputs,
    flag,
    must,
    option,
    shown,
    text,
    whole_number,
)
from specdec_core.config.fields import not_yet, refuse_unknown
from specdec_server.idle_fields import IdleChatFields, IdleFields
from specdec_server.prediction import FORM, parse_prediction
from specdec_server.response_format import FORMATS, parse_response_format
from specdec_server.speculative import Speculative

MOST_LOGPROBS = 20
"""Of the likeliest tokens at each position. Each of them takes room in the answer."""

SAMPLING = fields_dict(SamplingParams).keys() - {
    "logits_processors",  # functions
    "detokenize",  # answers have text
    "num_speculative_tokens",
    "speculative_methods",  # these two: speculative
}
"""The fields of `SamplingParams` that are fields of a request."""

is_text = must(lambda value: isinstance(value, str), "must be text", "text")
is_list = must(lambda value: isinstance(value, list | tuple), "must be a list", "a list")
is_object = must(lambda value: isinstance(value, Mapping), "must be an object", "an object", optional=True)


def objects(*, optional: bool = False) -> Check:
    """Make a check for a list of objects that is not empty."""
    return must(
        lambda value: isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value),
        "must be a list of one or more objects",
        "a list of one or more objects",
        optional=optional,
    )


@frozen(kw_only=True)
class StreamOptions:
    """The field `stream_options`."""

    include_usage: bool = option(flag, "End the stream with a chunk that has usage and metrics.", default=False)

    @classmethod
    def parse(cls, value: Any) -> StreamOptions | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"stream_options={shown(value)} must be an object, such as {{'include_usage': true}}")
        refuse_unknown(value, fields_dict(cls).keys(), "stream_options")
        return cls(**value)


@frozen(kw_only=True)
class Fields(IdleFields):
    """The fields that both endpoints have beside those of `SamplingParams`."""

    model: str | None = option(text(optional=True), "A name of the model. None: whatever model is served.")
    stream: bool = option(flag, "Answer in pieces, as server-sent events.", default=False)
    stream_options: StreamOptions | None = option(
        None, "Options of streams.", allowed="an object with include_usage", converter=StreamOptions.parse
    )
    speculative: Speculative | None = option(
        None,
        "How drafts are made for this request.",
        allowed="an object with enabled, num_tokens, method and details",
        converter=Speculative.parse,
    )
    return_token_ids: bool = option(flag, "Answer with the token ids of prompt and output, too.", default=False)
    cache_salt: str = option(is_text, "Requests share cached prefixes only if their salts are equal.", default="")

    response_format: StructuredOutputs | None = option(
        None, "The output's format.", allowed=FORMATS, converter=parse_response_format
    )

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> tuple[Self, SamplingParams]:
        """Check a body, in which null means: left out. Raises ConfigError for the first wrong or unknown field. Its
        message begins with the field's name."""
        own = fields_dict(cls).keys()
        refuse_unknown(body, own | SAMPLING, "the request")
        given = {key: value for key, value in body.items() if value is not None}
        fields = cls(**{key: value for key, value in given.items() if key in own})
        if fields.stream_options is not None and not fields.stream:
            raise ConfigError("stream_options are for streams: give stream=true, or leave them out")
        if fields.has_details and not fields.stream:
            raise ConfigError(
                "speculative has details=True, which are for streams: give stream=true, or leave them out"
            )
        sampling = {key: value for key, value in given.items() if key not in own}
        if isinstance(biases := sampling.get("logit_bias"), Mapping):
            sampling["logit_bias"] = {_token_id(key): bias for key, bias in biases.items()}
        if fields.response_format is not None:
            if "structured_outputs" in sampling:
                raise ConfigError("response_format and structured_outputs are both given: give one of them")
            sampling["structured_outputs"] = fields.response_format
        fields.complete(sampling)
        if fields.speculative is not None:
            sampling |= fields.speculative.sampling
        params = SamplingParams(**sampling)
        for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and not 0 <= number <= MOST_LOGPROBS:
                raise ConfigError(f"{name}={number} is out of range: give a whole number from 0 to {MOST_LOGPROBS}")
        if fields.stream and params.prompt_logprobs is not None and not getattr(fields, "echo", False):
            raise ConfigError("prompt_logprobs are not streamed: leave them out, or give stream=false")
        return fields, params

    @property
    def has_details(self) -> bool:
        return self.speculative is not None and self.speculative.details

    def complete(self, sampling: dict[str, Any]) -> None:
        """Add what the endpoint's own fields mean to the keywords of `SamplingParams`."""


@frozen(kw_only=True)
class ChatFields(Fields, IdleChatFields):
    """The fields of /v1/chat/completions."""

    messages: Sequence[Mapping[str, Any]] = option(objects(), "The conversation.")
    max_completion_tokens: int | None = option(whole_number(1, optional=True), "Newer name of max_tokens.")
    logprobs: bool = option(flag, "Answer with the logprobs of output tokens.", default=False)
    top_logprobs: int | None = option(
        whole_number(0, MOST_LOGPROBS, optional=True), "So many of the likeliest tokens at each position, too."
    )
    tools: Sequence[Any] = option(is_list, "Functions that the model may call.", default=())
    tool_choice: str = option(
        must(
            lambda value: value in ("none", "auto"),
            "is not supported, since nothing forces the model to call a tool yet: give 'auto' or 'none'",
            "'auto' or 'none'",
        ),
        "Whether the model may call tools.",
        default="auto",
    )
    add_generation_prompt: bool = option(flag, "End the prompt with the beginning of an answer.", default=True)
    continue_final_message: bool = option(flag, "Continue the last message instead of answering it.", default=False)
    chat_template: str | None = option(text(optional=True), "A Jinja template instead of the server's.")
    chat_template_kwargs: Mapping[str, Any] | None = option(is_object, "Further inputs of the chat template.")
    prediction: str | None = option(
        None, "Text that the answer is expected to resemble.", allowed=FORM, converter=parse_prediction
    )

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        for tool in self.tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name or tool.get("type") != "function":
                raise ConfigError(
                    f"tools has {shown(tool)}: give {{'type': 'function', 'function': "
                    f"{{'name': ..., 'parameters': ...}}}}"
                )

    @property
    def may_call_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def complete(self, sampling: dict[str, Any]) -> None:
        if self.max_completion_tokens is not None:
            if sampling.get("max_tokens", self.max_completion_tokens) != self.max_completion_tokens:
                raise ConfigError("max_tokens and max_completion_tokens differ: give one of them")
            sampling["max_tokens"] = self.max_completion_tokens
        sampling.setdefault("max_tokens", None)
        sampling["prediction"] = self.prediction
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0


@frozen(kw_only=True)
class CompletionFields(Fields):
    """The fields of /v1/completions."""

    prompt: Any = option(None, "Text, token ids, or a list of these.")
    echo: bool = option(flag, "Begin the text with the prompt.", default=False)
    add_special_tokens: bool = option(flag, "Let the tokenizer add its own to a text.", default=True)
    suffix: Any = option(not_yet(None), "Text after the completion.")

    @property
    def prompts(self) -> list[Any]:
        """Each prompt as `AsyncLLM.tokenize` takes it. Raises ConfigError."""
        prompt = self.prompt
        listed = prompt if isinstance(prompt, list) and not all(type(each) is int for each in prompt) else [prompt]
        if not all(isinstance(each, str) or (isinstance(each, list) and each) for each in listed):
            raise ConfigError(f"prompt={shown(prompt)} must be a text, a list of token ids, or a list of these")
        return [
            {"prompt" if isinstance(each, str) else "prompt_token_ids": each, "cache_salt": self.cache_salt}
            for each in listed
        ]

    def complete(self, sampling: dict[str, Any]) -> None:
        if self.echo and sampling.get("logprobs") is not None:
            sampling.setdefault("prompt_logprobs", sampling["logprobs"])


def _token_id(key: str) -> int | str:
    """The token id that a key of JSON is; others stay, and are refused with the rest."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key
