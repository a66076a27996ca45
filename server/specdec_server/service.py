"""What the endpoints share: the engine, the settings, the lives of requests and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, TypeVar

from starlette.requests import Request

from specdec_core import AsyncLLM, ConfigError, TokenizedPrompt
from specdec_server.errors import ApiError
from specdec_server.json_text import loads
from specdec_server.lifecycle import Lifecycle
from specdec_server.limits import LongestText
from specdec_server.metrics import ServerMetrics
from specdec_server.settings import Settings
from specdec_server.tool_parsers import MARKERS, PARSERS, ToolParser, parser_shown_by
from specdec_server.watchdog import Watchdog, step_timeout_of

T = TypeVar("T")

NUM_THREADS = 4
"""That tokenize prompts, compile grammars and write large answers. A long one holds up none of another request."""


class Service:
    """An engine and what one server needs beside it."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.lifecycle = Lifecycle(llm, settings)
        self.watchdog = Watchdog(llm, self.lifecycle, step_timeout_of(llm, settings.step_timeout_s))
        self.metrics = ServerMetrics(settings.model_names[0])
        self._threads = ThreadPoolExecutor(NUM_THREADS, "specdec-server")
        most_tokens = settings.max_prompt_tokens or llm.engine.target.info.max_model_len
        self._longest_text = LongestText(llm.get_tokenizer(), most_tokens)
        own = getattr(llm.get_tokenizer(), "chat_template", None)
        self.chat_template = settings.chat_template or (str(own) if own else None)
        self._tool_format = settings.tool_call_parser or parser_shown_by(self.chat_template or "")

    @property
    def methods(self) -> list[str]:
        """The names of the methods that draft; empty without speculation."""
        configs = self.llm.speculative_config or ()
        return [each.method for each in (configs if isinstance(configs, tuple) else (configs,))]

    async def read(self, request: Request) -> dict[str, Any]:
        """Read the body of a request. Raises ApiError if the server cannot run it, if it is too large or does not come
        to its end in time, if it is no JSON object or if it names another model."""
        self.lifecycle.check()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # others may come from a form on any website
            raise ApiError(415, f"content-type {kind!r} is not understood: send application/json")
        given = await self.lifecycle.receive_body(self._body(request))
        try:
            body = loads(given)
        except ValueError as error:
            raise ApiError(
                400, f"the body is not understood: {error}. Send a JSON object", code="invalid_json"
            ) from error
        name = body.get("model")
        if isinstance(name, str) and name not in self.settings.model_names:
            names = ", ".join(map(repr, self.settings.model_names))
            raise ApiError(
                404, f"there is no model {name!r}: the server has {names}", param="model", code="model_not_found"
            )
        return body

    async def _body(self, request: Request) -> bytes:
        most, parts, size = self.settings.max_body_bytes, list[bytes](), 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ApiError(413, f"the body is larger than the server's limit of {most} bytes: send less")
            parts.append(part)
        return b"".join(parts)

    async def tokenize(self, parts: Iterable[T], texts: Any = ()) -> list[T]:
        """Go through an iterator that tokenizes prompts, in a thread, so that it holds up neither the engine nor other
        requests. If this is cancelled, the thread stops after the part that it is at.

        texts: what is tokenized, in lists and mappings. Raises ApiError if no prompt can be as long.
        """
        self._longest_text.check(texts)
        is_wanted = True
        try:
            return await self.in_thread(lambda: [*takewhile(lambda _: is_wanted, parts)])
        finally:
            is_wanted = False

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run in a thread what would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_length(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """Return a prompt that the server takes. Raises ApiError for a longer one."""
        most = self.settings.max_prompt_tokens
        if most is not None and len(prompt.token_ids) > most:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.token_ids)} tokens, and the server takes {most}: shorten it",
                code="context_length_exceeded",
            )
        return prompt

    def chat_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of `AsyncLLM.tokenize_chat` for fields of a request. Raises ConfigError if it has a template
        that the server does not take, or if there is no template."""
        template = given.get("chat_template")
        if template is not None and not self.settings.trust_request_chat_template:
            raise ConfigError(
                "chat_template of a request is a program, which this server runs only if it is started with "
                "--trust-request-chat-template: leave it out"
            )
        if template is None and self.chat_template is None:
            raise ConfigError(
                "messages need a chat template, and the model's tokenizer has none: start the server with "
                "--chat-template FILE, or send the prompt to /v1/completions"
            )
        return {**given, "chat_template": template or self.settings.chat_template}

    def make_tool_parser(self) -> ToolParser:
        """Make a parser for one output. Raises ConfigError if the format of tool calls is not known."""
        if self._tool_format is None:
            raise ConfigError(
                f"tools need a parser of tool calls, and the chat template shows none: start the server with "
                f"--tool-call-parser {' or '.join(PARSERS)}"
            )
        return PARSERS[self._tool_format]()

    @property
    def has_special_tool_marker(self) -> bool:
        """Whether the text that marks a tool call is a special token, which is left out of texts by default."""
        added = getattr(self.llm.get_tokenizer(), "added_tokens_decoder", {}).values()
        special = [str(token) for token in added if token.special]
        return self._tool_format is not None and MARKERS[self._tool_format] in special

    def close(self) -> None:
        self._threads.shutdown(wait=False)
