"""What `LLM` and `AsyncLLM` share: an engine made from a user's keywords, prompts made requests, steps counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from attrs import frozen
from transformers.utils import logging

from specdec_core.config import AUTO, EngineConfig, SpeculativeConfig
from specdec_core.config_file import KEYS
from specdec_core.draft_checkpoint import completed
from specdec_core.engine import Engine
from specdec_core.engine.blame import blaming
from specdec_core.engine.request import Piece, Request
from specdec_core.errors import ConfigError
from specdec_core.legacy import OLD_KEYS, without_old_keys
from specdec_core.metrics import LOG_INTERVAL_S, Metrics
from specdec_core.plugins import Plugins
from specdec_core.prompts import PromptReader, TokenizedPrompt, load_tokenizer
from specdec_core.sampling_params import SamplingParams
from specdec_core.target.load import find_device, load_config, resolve_model

SampleListener = Callable[[int, int, Request, Sequence[Piece]], None]
"""(index of the prompt, index of the completion, request, what the step added to it)."""


@frozen(eq=False)
class Prepared:
    """A user's keywords, checked, with all that they name but the models' weights."""

    config: EngineConfig
    plugins: Plugins
    speculative: SpeculativeConfig | None
    tokenizer: Any


def prepare(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    skip_tokenizer_init: bool = False,
    speculative_config: Mapping[str, Any] | None = None,
    plugins: Plugins | None = None,
    **engine_config: Any,
) -> Prepared:
    """The keywords are those of `LLM`. Raises ConfigError, PluginError or CompatibilityError."""
    if not isinstance(skip_tokenizer_init, bool):
        raise ConfigError(f"skip_tokenizer_init={skip_tokenizer_init!r} must be True or False")
    if tokenizer is not None and (not isinstance(tokenizer, str | Path) or not str(tokenizer)):
        raise ConfigError(f"tokenizer={tokenizer!r} must be a folder or a name, or None for the model's own")
    if plugins is not None and not hasattr(plugins, "proposer"):
        raise ConfigError(f"plugins={plugins!r} must be what Plugins.load() returns, or None")
    engine_config, speculative_config = without_old_keys(engine_config, speculative_config)
    config = EngineConfig.from_mapping({"model": model, **engine_config}, other_keys=KEYS | {"plugins"} | OLD_KEYS)
    plugins, device = plugins or Plugins.load(), find_device(config.device)
    speculative = None
    if speculative_config is not None:
        mapping = completed(speculative_config, model, plugins)
        verifier, verifier_config = mapping.get("verifier", AUTO), None
        if isinstance(verifier, str) and verifier != AUTO:
            verifier_config = plugins.verifier(verifier).config
        method = plugins.proposer(mapping["method"])
        number = method.num_speculative_tokens
        default = None if number is None else lambda options: number(options, device)
        with blaming(f"proposer {method.name!r}", "say how many tokens to draft"):
            speculative = SpeculativeConfig.from_mapping(mapping, method.config, verifier_config, default)
    load_config(  # its errors come first
        resolve_model(model),
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        code_revision=config.code_revision,
    )
    return Prepared(config, plugins, speculative, None if skip_tokenizer_init else load_tokenizer(config, tokenizer))


class Frontend:
    """An engine, the prompt reader before it and the metrics behind it. Not for two threads at a time.

    The keywords are those of `LLM`.
    """

    def __init__(self, model: str | Path, **keywords: Any) -> None:
        prepared = prepare(model, **keywords)
        config = prepared.config
        self.prompts = PromptReader(prepared.tokenizer)
        with _no_progress_bar():
            self.engine = Engine(config, prepared.plugins, prepared.speculative, prepared.tokenizer)
        self.metrics = Metrics(
            self.engine.num_speculative_tokens,
            prefix=config.metrics_prefix,
            log_interval_s=None if config.disable_log_stats else LOG_INTERVAL_S,
        )

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        listener: SampleListener,
        *,
        is_streamed: bool = False,
    ) -> list[list[str]]:
        """All prompts become requests, n for each, or none does. Returns their ids."""
        submitted: list[list[str]] = []
        try:
            for prompt, params in zip(prompts, _one_each(sampling_params, len(prompts)), strict=True):
                submitted.append([])
                for index in range(params.n):
                    listen = partial(listener, len(submitted) - 1, index)
                    request_id = self.engine.add_request(
                        prompt.token_ids, params.of_sample(index), listen, is_streamed=is_streamed
                    )
                    submitted[-1].append(request_id)
        except BaseException:
            self.cancel(submitted)
            raise
        return submitted

    def step(self) -> None:
        started = perf_counter()
        report = self.engine.step()
        self.metrics.update(report, perf_counter() - started)

    def cancel(self, submitted: Sequence[Sequence[str]]) -> None:
        """All of them, whatever ending one of them raises. Those that have ended are left alone."""
        with ExitStack() as cancelling:
            for request_id in chain.from_iterable(submitted):
                cancelling.callback(self.engine.cancel, request_id)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ConfigError(f"sampling_params={params!r} must be a SamplingParams, or one for each prompt")
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each")
    return params


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without the bar that transformers shows while it loads weights. Those of downloads are shown."""

    def hidden(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    before = logging.set_tqdm_hook(hidden)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
