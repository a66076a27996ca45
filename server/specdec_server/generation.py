"""Runs the prompts of a request, and what the answers of both endpoints have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from specdec_core import (
    CapacityError,
    ConfigError,
    Piece,
    SamplingParams,
    StreamOutput,
    TokenizedPrompt,
)
from specdec_server.completion import Completion
from specdec_server.errors import ApiError
from specdec_server.json_text import dumps, dumps_in_parts, new_id
from specdec_server.limits import check_params, check_prompts
from specdec_server.prediction import prediction_usage, tokenized
from specdec_server.protocol import SAMPLING, Fields
from specdec_server.service import Service
from specdec_server.speculative import acceptance, details


class Answer(ABC):
    """The answer to one request for completions: whole, or in chunks.

    kind, chunk_kind: the `object` of the answer and of its chunks.
    required: the field without which there is nothing to answer.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    required: ClassVar[str]

    def __init__(self, service: Service, fields: Fields, params: SamplingParams, num_prompts: int) -> None:
        self.service, self.fields, self.params = service, fields, params
        self.is_streamed = fields.stream
        self.completions: list[Completion] = []
        self._num_prompts = num_prompts
        self._num_tokens = service.llm.engine.num_speculative_tokens
        self._head = {
            "id": new_id(self.id_prefix),
            "object": self.chunk_kind if fields.stream else self.kind,
            "created": int(time.time()),
            "model": service.settings.model_names[0],
        }
        check_params(params, num_prompts, service.llm.engine.target.info.max_model_len)
        if fields.speculative is not None:
            fields.speculative.check(service.methods, self._num_tokens)

    @property
    @abstractmethod
    def texts(self) -> Any:
        """What `read_prompts` tokenizes, in lists and mappings."""

    @abstractmethod
    def read_prompts(self) -> Iterator[TokenizedPrompt]:
        """Tokenize the request's prompts, one after the other. Runs in a thread of its own. Raises ConfigError."""

    @abstractmethod
    def choice(self, completion: Completion) -> dict[str, Any]:
        """A finished completion as an entry of `choices`."""

    @abstractmethod
    def chunk_choice(self, completion: Completion, output: StreamOutput) -> dict[str, Any] | None:
        """What is new in a completion as an entry of a chunk's `choices`; None: nothing to send yet."""

    async def whole(self) -> bytes:
        """Run the request, and return the answer as JSON."""
        async with aclosing(self._outputs()) as outputs:
            async for _ in outputs:
                pass
        has_logprobs = self.params.logprobs is not None or self.params.prompt_logprobs is not None
        return await self._written(self._whole, is_large=has_logprobs) or b""

    def _whole(self) -> dict[str, Any]:
        choices = [self.choice(each) for each in self.completions]
        return {**self._head, "choices": choices, **self._usage, **self.extra}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Run the request, and yield the answer's chunks as JSON."""
        options, is_first = self.fields.stream_options, True
        has_usage = options is not None and options.include_usage
        no_usage = {"usage": None} if has_usage else {}
        async with aclosing(self._outputs()) as outputs:
            async for completion, output in outputs:
                rest = {**no_usage, **(self.extra if is_first else {})}
                make = partial(self._chunk, completion, output, rest)
                has_prompt = not completion.is_begun and self.params.prompt_logprobs is not None
                chunk = await self._written(make, is_large=has_prompt)
                if chunk is not None:
                    yield chunk
                    is_first = False
        if has_usage:
            yield dumps({**self._head, "choices": [], **self._usage})

    def _chunk(self, completion: Completion, output: StreamOutput, rest: dict[str, Any]) -> dict[str, Any] | None:
        choice = self.chunk_choice(completion, output)
        return None if choice is None else {**self._head, "choices": [choice], **rest}

    async def _written(self, make: Callable[[], dict[str, Any] | None], *, is_large: bool) -> bytes | None:
        """Write what a function makes as JSON; None: it makes nothing. The largest answers, which have logprobs, take
        ten seconds, and are written in a thread."""
        if not is_large:
            return None if (found := make()) is None else dumps(found)
        return await self.service.in_thread(lambda: None if (found := make()) is None else dumps_in_parts(found))

    def is_due(self, completion: Completion, content: object) -> bool:
        """Whether there is something to send of a completion: content, its beginning, its end, or tokens without text,
        if the request asks for what belongs to tokens."""
        is_first, fields = not completion.is_begun, self.fields
        has_tokens = self.params.logprobs is not None or fields.return_token_ids or fields.has_details
        return bool(content or is_first or has_tokens or completion.finish_reason)

    def entry(self, completion: Completion, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What entries of `choices` have at both endpoints, but for the text and its logprobs.

        pieces: the tokens that no earlier entry has.
        """
        found: dict[str, Any] = {
            "index": completion.number,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.fields.return_token_ids:
            found["token_ids"] = [piece.token_id for piece in pieces]
        if self.fields.has_details:
            found["speculative"] = details(completion.num_drafts, pieces)
        return found

    @property
    def extra(self) -> dict[str, Any]:
        """Further fields of a whole answer, and of the first chunk."""
        return {}

    async def _outputs(self) -> AsyncGenerator[tuple[Completion, StreamOutput], None]:
        """Run the prompts, and yield what each step adds to a completion."""
        service, n = self.service, self.params.n
        with service.lifecycle.admit(self._num_prompts * n):
            prompts = await service.tokenize(self._prepare(), self.texts)
            self.completions = [Completion(i * n + j, prompt) for i, prompt in enumerate(prompts) for j in range(n)]
            given = [{"prompt_token_ids": each.token_ids, "cache_salt": each.cache_salt} for each in prompts]
            is_refused = False
            try:
                running = service.llm.generate(
                    given,
                    self.params,
                    stream=self.is_streamed,
                    stream_interval_s=service.settings.stream_interval_s if self.is_streamed else 0.0,
                )
                async with aclosing(running) as outputs:
                    async for output in outputs:
                        completion = self.completions[output.prompt_index * n + output.index]
                        completion.add(output)
                        if output.finish_reason in ("error", "abort"):
                            raise self._failure(output.error or "the engine aborted the request")
                        yield completion, output
            except (CapacityError, ConfigError):
                is_refused = True
                raise
            finally:
                if not is_refused:
                    service.metrics.count(completion.finish_reason for completion in self.completions)

    def _failure(self, message: str) -> ApiError:
        """The error to answer with if the engine ended a request. Its message begins with a field of the request if
        that is the reason, such as a grammar with too many parts."""
        name = message.partition(" ")[0]
        if name not in SAMPLING:
            return ApiError(500, message, code="generation_failed")
        return ApiError(400, message, param=name if self.fields.response_format is None else "response_format")

    def _prepare(self) -> Iterator[TokenizedPrompt]:
        """Compile the request's grammar, tokenize its prediction, and yield its prompts. Runs in a thread of its own.
        Raises ConfigError, and ApiError for a prompt that is too long."""
        if self.params.structured_outputs is not None:
            self.service.llm.compile_grammar(self.params.structured_outputs)
        self.params = tokenized(self.params, self.service.llm.get_tokenizer())
        num_tokens = 0
        for prompt in map(self.service.check_length, self.read_prompts()):
            num_tokens += len(prompt.token_ids)
            check_prompts(self.params, num_tokens)
            yield prompt

    @property
    def _usage(self) -> dict[str, Any]:
        first = self.completions[:: self.params.n]
        num_prompt_tokens = sum(len(each.prompt.token_ids) for each in first)
        num_output_tokens = sum(len(each.pieces) for each in self.completions)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in first)},
            **prediction_usage(self.params, chain.from_iterable(each.pieces for each in self.completions)),
        }
        if len(self.completions) > 1 or not self._num_tokens:
            return {"usage": usage, "metrics": None}
        figures = acceptance(self.completions[0].speculation, self._num_tokens)
        return {"usage": usage, "metrics": {"speculative_decoding": figures}}
