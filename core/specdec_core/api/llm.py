"""`LLM`: a causal language model with speculative decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from tqdm import tqdm

from specdec_core.api.outputs import RequestOutput, StreamOutput
from specdec_core.api.prompts import Conversations, Prompts, TokenizedPrompt
from specdec_core.api.session import Session
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.engine.metrics import Metric
from specdec_core.engine.request import Piece, Request
from specdec_core.errors import ConfigError
from specdec_core.plugins import Plugins

BAR_DELAY_S = 1.0

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A causal language model with speculative decoding, with vLLM's parameter names.

    model: a folder, a name on the model hub, or the name of a model that is installed as a Python package ("tiny").
    speculative_config: a `SpeculativeConfig`, a flat dict with the same keys, or just the name of a method. For several
        methods at once, `method` is a list of names, and of dicts with the keys of one method. None: plain decoding.
    plugins: the plugins to use, as `Plugins.load` returns them. None: all installed plugins.

    All other keywords are those of `EngineConfig`. Only one thread at a time may use an LLM. `generate` may be called
    while a stream is unfinished. For asyncio there is `AsyncLLM`. To close the LLM, call `close` or create it in
    `with LLM(...) as llm:`; otherwise it closes when it is garbage-collected or when the interpreter exits.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        speculative_config: str | Mapping[str, Any] | SpeculativeConfig | Sequence[SpeculativeConfig] | None = None,
        plugins: Plugins | None = None,
        **engine_config: Any,
    ) -> None:
        self._session = Session(
            model,
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            speculative_config=speculative_config,
            plugins=plugins,
            **engine_config,
        )
        self.engine = self._session.engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_healthy(self) -> bool:
        """Whether prompts can be run. False after `close`, and after the device has failed or another rank has ended
        (`DeviceError`). A failed device can be used only by a new process. For the health check of a server."""
        return not self.engine.is_closed and self.engine.failure is None

    @property
    def speculative_config(self) -> SpeculativeConfig | tuple[SpeculativeConfig, ...] | None:
        """How this LLM speculates, complete with what was left out; a tuple for several methods. None: plain
        decoding."""
        return self._session.speculative_config

    def close(self) -> None:
        """Abort all requests and let the proposers save their state; no prompt can be run afterwards. May be called
        again. Memory is freed when the LLM is garbage-collected.

        Raises PluginError if a proposer fails to close.
        """
        self._session.close()

    @overload
    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, use_tqdm: bool = True, stream: Literal[False] = False
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, use_tqdm: bool = True, stream: Literal[True]
    ) -> Iterator[StreamOutput]: ...

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, use_tqdm: bool = True, stream: bool = False
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        """Complete all prompts and return their outputs in the same order. All prompts are checked before any is run.

        prompts: one prompt or a list. Each is a string, {"prompt": str} or {"prompt_token_ids": [int, ...]}.
        sampling_params: one for all prompts, or a list with one for each. None: the defaults.
        use_tqdm: show a progress bar if the call takes longer than a second.
        stream: return an iterator over new tokens instead, as the method `stream` does.
        """
        return self._run(lambda: self._session.prompts.read(prompts), sampling_params, use_tqdm, stream)

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        stream: Literal[True],
    ) -> Iterator[StreamOutput]: ...

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        stream: bool = False,
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        """Answer one conversation, or each of several, as `generate` completes prompts.

        messages: a list of {"role": ..., "content": ...}, or several such lists; the chat template turns each list into
            a prompt. A content is a string or a list of text parts, {"type": "text", "text": ...}.
        chat_template: a Jinja template to use instead of the tokenizer's. None: the tokenizer's.
        add_generation_prompt: end the prompt with the beginning of the assistant's answer.
        continue_final_message: let the model continue the last message instead of answering it. Requires
            add_generation_prompt=False.
        tools, chat_template_kwargs: further inputs of the chat template.
        use_tqdm, stream: as for `generate`.
        """
        arguments = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }

        def read() -> list[TokenizedPrompt]:
            return self._session.prompts.read_chats(messages, arguments, chat_template_kwargs or {})

        return self._run(read, sampling_params, use_tqdm, stream)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[StreamOutput]:
        """Complete all prompts together, yielding each step's new tokens.

        The prompts are checked when the first output is requested. Closing the iterator cancels unfinished requests.
        """
        return self._stream(lambda: self._session.prompts.read(prompts), sampling_params)

    def get_tokenizer(self) -> Any:
        """The tokenizer from transformers; None with skip_tokenizer_init=True."""
        return self._session.prompts.tokenizer

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics: counts since this LLM was created, and how busy the engine is now. Each has a `name`
        and a `value`."""
        return self._session.read_metrics()

    def _run(
        self, read: Callable[[], list[TokenizedPrompt]], sampling_params: Params, use_tqdm: bool, stream: bool
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        for name, value in (("use_tqdm", use_tqdm), ("stream", stream)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={shown(value)} must be True or False")
        return self._stream(read, sampling_params) if stream else self._complete(read(), sampling_params, use_tqdm)

    def _complete(
        self, prompts: Sequence[TokenizedPrompt], sampling_params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        finished: dict[str, Request] = {}

        def keep(prompt_index: int, index: int, request: Request, pieces: Sequence[Piece]) -> None:
            if request.finish_reason is not None:
                finished[request.id] = request
                bar.update()

        with tqdm(disable=not use_tqdm, delay=BAR_DELAY_S, unit="request") as bar:
            submitted = self._session.submit(prompts, sampling_params, keep)
            num_requests = sum(map(len, submitted))
            bar.total = num_requests  # reset(num_requests) would show it at once, whatever the delay
            try:
                while len(finished) < num_requests:
                    self._session.step()
            finally:
                self._session.cancel(submitted)
        return [
            RequestOutput.of(prompt, [finished[request_id] for request_id in request_ids])
            for prompt, request_ids in zip(prompts, submitted, strict=True)
        ]

    def _stream(self, read: Callable[[], list[TokenizedPrompt]], sampling_params: Params) -> Iterator[StreamOutput]:
        queue: deque[StreamOutput] = deque()

        def put(prompt_index: int, index: int, request: Request, pieces: Sequence[Piece]) -> None:
            queue.append(StreamOutput.of(prompt_index, index, request, pieces))

        submitted = self._session.submit(read(), sampling_params, put, is_streamed=True)
        num_running = sum(map(len, submitted))
        try:
            while num_running:
                self._session.step()
                while queue:
                    num_running -= queue[0].finish_reason is not None
                    yield queue.popleft()
        finally:
            self._session.cancel(submitted)
