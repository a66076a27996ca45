"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve

from specdec_core import StreamOutput, TokenizedPrompt
from specdec_server.completion import Completion, entries
from specdec_server.generation import Answer
from specdec_server.json_text import new_id
from specdec_server.logprobs import chat_logprobs, prompt_logprobs
from specdec_server.protocol import ChatFields
from specdec_server.service import Service
from specdec_server.tool_calls import Found, ToolCall
from specdec_server.tool_parsers import ToolParser

TEMPLATE_FIELDS = ("chat_template", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class ChatAnswer(Answer):
    """Answers to one conversation."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    required = "messages"
    fields: ChatFields

    def __init__(self, service: Service, body: Mapping[str, Any]) -> None:
        fields, params = ChatFields.parse(body)
        self._arguments = service.chat_arguments({name: getattr(fields, name) for name in TEMPLATE_FIELDS})
        self._parsers: dict[int, ToolParser] = {}
        self._num_calls: dict[int, int] = {}
        if fields.may_call_tools:
            self._parsers = {number: service.make_tool_parser() for number in range(params.n)}
            self._arguments["tools"] = list(fields.tools)
            if service.has_special_tool_marker:
                params = evolve(params, skip_special_tokens=False)
        super().__init__(service, fields, params, 1)

    @property
    def texts(self) -> Any:
        return self.fields.messages

    def read_prompts(self) -> Iterator[TokenizedPrompt]:
        messages = readable(self.fields.messages)
        prompt = self.service.llm.tokenize_chat(messages, **self._arguments)
        yield evolve(prompt, cache_salt=self.fields.cache_salt)

    def choice(self, completion: Completion) -> dict[str, Any]:
        content, calls = self._parse(completion, completion.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        return {**self._choice(completion), "message": message}

    def chunk_choice(self, completion: Completion, output: StreamOutput) -> dict[str, Any] | None:
        content, calls = self._parse(completion, output.text)
        if not self.is_due(completion, content or calls):
            return None
        is_first, completion.is_begun = not completion.is_begun, True
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if content or not calls:
            delta["content"] = content
        if calls:
            first = self._num_calls.get(completion.number, 0) - len(calls)
            delta["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(calls)]
        return {**self._choice(completion), "delta": delta}

    @property
    def extra(self) -> dict[str, Any]:
        first = self.completions[0]
        found: dict[str, Any] = {}
        if self.params.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        if self.fields.return_token_ids:
            found["prompt_token_ids"] = list(first.prompt.token_ids)
        return found

    def _parse(self, completion: Completion, text: str) -> Found:
        """Split new text into content and tool calls. The completion's last text also gives what was held back."""
        parser = self._parsers.get(completion.number)
        if parser is None:
            return Found(text, [])
        content, calls = parser.feed(text)
        if completion.finish_reason is not None:
            rest = parser.finish()
            content, calls = content + rest.content, calls + rest.calls
        self._num_calls[completion.number] = self._num_calls.get(completion.number, 0) + len(calls)
        return Found(content, calls)

    def _choice(self, completion: Completion) -> dict[str, Any]:
        """An entry of `choices` without its text, with what belongs to the tokens that no earlier entry has."""
        pieces = completion.take_new()
        choice = self.entry(completion, pieces)
        if choice["finish_reason"] == "stop" and self._num_calls.get(completion.number):
            choice["finish_reason"] = "tool_calls"
        if self.params.logprobs is not None:
            content = chat_logprobs(entries(pieces), self.params.logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        return choice


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": call._asdict()}


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give chat templates messages as they expect them: an empty content where there is none, and the arguments of
    earlier tool calls as objects, which OpenAI's API has as JSON text."""
    found = []
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        found.append({**message, "content": "" if content is None else content})
        if isinstance(calls, list):
            found[-1]["tool_calls"] = [_with_arguments(call) for call in calls]
    return found


def _with_arguments(call: Any) -> Any:
    with suppress(KeyError, TypeError, ValueError, RecursionError):  # the template refuses what is no call
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    return call
