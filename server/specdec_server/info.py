"""The endpoints beside completions: models, tokens, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

import specdec_core
from specdec_core import ConfigError, flag, option, shown, text
from specdec_core.config.fields import refuse_unknown
from specdec_server.chat import TEMPLATE_FIELDS, readable
from specdec_server.errors import ApiError
from specdec_server.json_text import JSONText
from specdec_server.protocol import is_list, is_object, objects
from specdec_server.service import Service

METRICS_TIMEOUT_S = 10.0
"""The engine tells its metrics between two steps. If a step takes longer than this, something is wrong."""


@frozen(kw_only=True)
class TokenizeFields:
    """The fields of /tokenize: either a prompt, or messages with what goes with them."""

    model: str | None = option(text(optional=True), "A name of the model.")
    prompt: str | None = option(text(optional=True), "A text.")
    add_special_tokens: bool = option(flag, "Let the tokenizer add its own to a text.", default=True)
    return_token_strs: bool = option(flag, "Answer with the text of each token, too.", default=False)
    messages: Sequence[Any] | None = option(objects(optional=True), "A conversation.")
    tools: Sequence[Any] = option(is_list, "Functions that the model may call.", default=())
    add_generation_prompt: bool = option(flag, "End the prompt with the beginning of an answer.", default=True)
    continue_final_message: bool = option(flag, "Continue the last message instead of answering it.", default=False)
    chat_template: str | None = option(text(optional=True), "A Jinja template instead of the server's.")
    chat_template_kwargs: Any = option(is_object, "Further inputs of the chat template.")


class Info:
    """Endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONText({"object": "list", "data": [self._model(name) for name in self._service.settings.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.settings.model_names:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return JSONText(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        first = self._service.settings.model_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "root": first,
            "max_model_len": self._service.llm.engine.target.info.max_model_len,
            "has_chat_template": self._service.chat_template is not None,
            "speculative": {
                "methods": self._service.methods,
                "num_tokens": self._service.llm.engine.num_speculative_tokens,
            },
        }

    async def tokenize(self, request: Request) -> Response:
        body = await self._service.read(request)
        try:
            ((token_ids, strings),) = await self._service.tokenize(self._token_ids(body), body)
        except ConfigError as error:
            raise ApiError.of(error, body) from error
        max_model_len = self._service.llm.engine.target.info.max_model_len
        return JSONText(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        )

    def _token_ids(self, body: dict[str, Any]) -> Iterator[tuple[list[int], list[str] | None]]:
        """Yield the token ids and, if they are asked for, their texts, once."""
        refuse_unknown(body, TokenizeFields.__annotations__.keys(), "the request")
        fields = TokenizeFields(**{key: value for key, value in body.items() if value is not None})
        if (fields.prompt is None) == (fields.messages is None):
            raise ConfigError("give one of prompt and messages")
        llm = self._service.llm
        if fields.prompt is not None:
            found = llm.tokenize(fields.prompt, add_special_tokens=fields.add_special_tokens)
        else:
            given = {name: getattr(fields, name) for name in TEMPLATE_FIELDS}
            arguments = self._service.chat_arguments(given | {"tools": list(fields.tools) or None})
            found = llm.tokenize_chat(readable(fields.messages or ()), **arguments)
        token_ids = list(found.token_ids)
        strings = llm.get_tokenizer().convert_ids_to_tokens(token_ids) if fields.return_token_strs else None
        yield token_ids, strings

    async def detokenize(self, request: Request) -> Response:
        body = await self._service.read(request)
        tokens, vocab_size = body.get("tokens"), self._service.llm.engine.target.info.vocab_size
        try:
            refuse_unknown(body, {"model", "tokens"}, "the request")
            if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocab_size for t in tokens):
                raise ConfigError(f"tokens={shown(tokens)} must be a list of token ids from 0 to {vocab_size - 1}")
        except ConfigError as error:
            raise ApiError.of(error, body) from error
        decode = self._service.llm.get_tokenizer().decode
        (text,) = await self._service.tokenize(map(decode, [tokens]))
        return JSONText({"prompt": text})

    async def health(self, request: Request) -> Response:
        try:
            self._service.lifecycle.check()
        except ApiError as error:
            return JSONText(error.body, 503)
        return JSONText({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONText({"version": specdec_core.__version__})

    async def load(self, request: Request) -> Response:
        return JSONText({"server_load": self._service.lifecycle.num_requests})

    async def metrics(self, request: Request) -> Response:
        if self._service.watchdog.is_stuck:
            self._service.lifecycle.check()
        reading = self._service.llm.read_metrics()
        try:
            return self._service.metrics.response(await asyncio.wait_for(reading, METRICS_TIMEOUT_S))
        except TimeoutError as error:
            message = f"the engine has not ended a step for {METRICS_TIMEOUT_S:g} s: look at its log, or restart it"
            raise ApiError(500, message, code="engine_stuck") from error
