"""What `LLM` and `AsyncLLM` share: a session with an engine, a prompt reader and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

from transformers.utils import logging

from specdec_core.api.arguments import prepare
from specdec_core.api.prompts import PromptReader, TokenizedPrompt
from specdec_core.config.fields import shown
from specdec_core.config.sampling import SamplingParams
from specdec_core.engine.engine import Engine
from specdec_core.engine.metrics import LOG_INTERVAL_S, Metric, Metrics
from specdec_core.engine.request import Piece, Request
from specdec_core.errors import ConfigError

SampleListener = Callable[[int, int, Request, Sequence[Piece]], None]
"""Receives (index of the prompt, index of the completion, request, the pieces that the step added to it)."""


class Session:
    """An engine with a prompt reader and metrics, made from the keywords of `LLM`. Only one thread at a time may use
    it."""

    def __init__(self, model: str | Path, **keywords: Any) -> None:
        prepared = prepare(model, **keywords)
        config, self.speculative_config = prepared.config, prepared.speculative
        self.prompts = PromptReader(prepared.tokenizer)
        with _no_progress_bar():
            self.engine = Engine.build(config, prepared.plugins, prepared.speculative, prepared.tokenizer)
        self.metrics = Metrics(
            self.engine.num_speculative_tokens,
            prefix=config.metrics_prefix,
            log_interval_s=None if config.disable_log_stats else LOG_INTERVAL_S,
        )
        self._log_last_line = finalize(self, self.metrics.close)  # also at the interpreter's exit, and once only

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        listener: SampleListener,
        *,
        is_streamed: bool = False,
    ) -> list[list[str]]:
        """Queue all prompts. Each prompt gets one request per completion (n of its sampling parameters). If one prompt
        is wrong, none is queued.

        listener: called for a request after each step that adds output to it, with the index of the prompt, the index
            of the completion, the request and the new tokens.
        is_streamed: decode each token's text when it is emitted.

        Returns a list of request ids for each prompt.
        """
        submitted: list[list[str]] = []
        try:
            for prompt, params in zip(prompts, _one_each(sampling_params, len(prompts)), strict=True):
                submitted.append([])
                for index in range(params.n):
                    listen, sample = partial(listener, len(submitted) - 1, index), params.of_sample(index)
                    request_id = self.engine.add_request(
                        prompt.token_ids, sample, listen, is_streamed=is_streamed, cache_salt=prompt.cache_salt
                    )
                    submitted[-1].append(request_id)
        except BaseException:
            self.cancel(submitted)
            raise
        return submitted

    def step(self) -> None:
        started = perf_counter()
        report = self.engine.step()
        self.metrics.update(report, perf_counter() - started, lambda: self.engine.load)

    def read_metrics(self) -> list[Metric]:
        return self.metrics.read(self.engine.load)

    def close(self) -> None:
        """Close the engine, and write the last line to the log. May be called again."""
        try:
            self.engine.close()
        finally:
            if self.engine.is_closed:
                self._log_last_line()

    def cancel(self, submitted: Sequence[Sequence[str]]) -> None:
        """Cancel requests. If cancelling one raises an error, the others are still cancelled. Requests that have ended
        are ignored.

        submitted: request ids, as `submit` returns them.
        """
        self.engine.cancel(*chain.from_iterable(submitted))


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ConfigError(f"sampling_params={shown(params)} must be a SamplingParams, or one for each prompt")
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each")
    return params


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A context that hides transformers' progress bar for loading weights. Bars of downloads are shown."""

    def hidden(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    before = logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
