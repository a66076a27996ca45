"""The front door: a model, and speculation by one dict."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from specdec_core.config import EngineConfig, SpeculativeConfig
from specdec_core.engine import Engine
from specdec_core.engine.request import Listener, Piece, Request
from specdec_core.errors import ConfigError
from specdec_core.metrics import Counter, Metrics, Vector
from specdec_core.outputs import CompletionOutput, RequestOutput, StreamOutput
from specdec_core.plugins import Plugins
from specdec_core.sampling_params import SamplingParams
from specdec_core.target.load import load_config, resolve_model

Prompt = str | Mapping[str, Any]

BAR_DELAY_S = 1.0


class LLM:
    """A causal language model with speculative decoding, with vLLM's parameter names.

    model: a folder, a name on the model hub, or "tiny", the embedded model. speculative_config: one flat dict of
    `method`, `num_speculative_tokens`, the other keys of `SpeculativeConfig` and the method's own; None: plain
    decoding. The remaining keywords are those of `EngineConfig`. plugins: None: all that are installed. One thread at a
    time may use it; several streams and `generate` may take turns.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        plugins: Plugins | None = None,
        **engine_config: Any,
    ) -> None:
        if not isinstance(skip_tokenizer_init, bool):
            raise ConfigError(f"skip_tokenizer_init={skip_tokenizer_init!r} must be True or False")
        if plugins is not None and not hasattr(plugins, "proposer"):
            raise ConfigError(f"plugins={plugins!r} must be what Plugins.load() returns, or None")
        own = {"tokenizer", "skip_tokenizer_init", "speculative_config", "plugins"}
        config = EngineConfig.from_mapping({"model": model, **engine_config}, other_keys=own)
        plugins = plugins or Plugins.load()
        speculative = _speculative_config(speculative_config, plugins) if speculative_config is not None else None
        load_config(resolve_model(model), trust_remote_code=config.trust_remote_code)  # its errors come first
        self._tokenizer: Any = None
        if not skip_tokenizer_init:
            self._tokenizer = _load_tokenizer(tokenizer or model, trust_remote_code=config.trust_remote_code)
        self.engine = Engine(config, plugins, speculative, self._tokenizer)
        self._metrics = Metrics(self.engine.num_speculative_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts; the outputs stand in their order.

        A prompt is a string, {"prompt": str} or {"prompt_token_ids": [int, ...]}. sampling_params: one for all, or one
        for each. use_tqdm: show a bar when it takes longer than a second. All prompts are checked before any is run.
        """
        finished: dict[str, Request] = {}

        def keep(request: Request, pieces: Sequence[Piece]) -> None:
            if request.finish_reason is not None:
                finished[request.id] = request
                bar.update()

        texts, token_ids = self._tokenize(prompts)
        bar = tqdm(total=len(texts), disable=not use_tqdm, delay=BAR_DELAY_S, unit="request")
        submitted = self._submit(token_ids, sampling_params, keep)
        with bar, self._cancelling(submitted):
            while len(finished) < len(submitted):
                self._metrics.update(self.engine.step())
        return [_output(finished[request_id], text) for request_id, text in zip(submitted, texts, strict=True)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Complete all prompts together, yielding each step's new tokens as they are decided.

        The prompts are checked when the first output is asked for. Closing the iterator cancels what is left.
        """
        queue: deque[StreamOutput] = deque()
        indices: dict[str, int] = {}

        def put(request: Request, pieces: Sequence[Piece]) -> None:
            queue.append(StreamOutput(indices[request.id], tuple(pieces), request.finish_reason))

        _, token_ids = self._tokenize(prompts)
        submitted = self._submit(token_ids, sampling_params, put, is_streamed=True)
        indices.update({request_id: index for index, request_id in enumerate(submitted)})
        num_running = len(submitted)
        with self._cancelling(submitted):
            while num_running:
                self._metrics.update(self.engine.step())
                while queue:
                    num_running -= queue[0].finish_reason is not None
                    yield queue.popleft()

    def get_metrics(self) -> list[Counter | Vector]:
        """Counters since this LLM was made: each has a `name` and a `value`."""
        return self._metrics.read()

    def _tokenize(self, prompts: Prompt | Sequence[Prompt]) -> tuple[list[str | None], list[Any]]:
        """The prompts' texts, None where only token ids were given, and their token ids."""
        listed = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if not isinstance(listed, Sequence):
            raise ConfigError(f"prompts={prompts!r} is not understood: give one prompt, or a list of them")
        texts: list[str | None] = []
        token_ids: list[list[int]] = []
        for prompt in listed:
            given: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
            is_known = isinstance(given, Mapping) and set(given) in ({"prompt"}, {"prompt_token_ids"})
            if not is_known or not isinstance(given.get("prompt", ""), str):
                raise ConfigError(
                    f"prompt {prompt!r} is not understood: give a string, {{'prompt': str}} or "
                    f"{{'prompt_token_ids': [int, ...]}}"
                )
            if "prompt_token_ids" in given:
                texts.append(None)
                token_ids.append(given["prompt_token_ids"])  # the engine checks them
            elif self._tokenizer is not None:
                texts.append(given["prompt"])
                token_ids.append(_tokens(self._tokenizer, given["prompt"]))
            else:
                raise ConfigError("skip_tokenizer_init=True left out the tokenizer: give {'prompt_token_ids': [...]}")
        return texts, token_ids

    def _submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        listener: Listener,
        *,
        is_streamed: bool = False,
    ) -> list[str]:
        """All prompts become requests, or none does."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: Sequence[SamplingParams] = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = sampling_params
        if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
            raise ConfigError(f"sampling_params={sampling_params!r} must be a SamplingParams, or one for each prompt")
        if len(params) != len(prompts):
            raise ConfigError(f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one for each")
        submitted: list[str] = []
        try:
            for token_ids, wanted in zip(prompts, params, strict=True):
                submitted.append(self.engine.add_request(token_ids, wanted, listener, is_streamed=is_streamed))
        except BaseException:
            for request_id in submitted:
                self.engine.cancel(request_id)
            raise
        return submitted

    @contextmanager
    def _cancelling(self, request_ids: Sequence[str]) -> Iterator[None]:
        """However the block is left, none of the requests runs on."""
        try:
            yield
        finally:
            for request_id in request_ids:
                self.engine.cancel(request_id)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt {text[:40]!r} is not text: character {error.start} is half of a pair") from error
    token_ids: list[int] = tokenizer(text).input_ids
    if not token_ids:
        raise ConfigError(f"prompt {text!r} has no tokens: give at least one character")
    return token_ids


def _speculative_config(mapping: Mapping[str, Any], plugins: Plugins) -> SpeculativeConfig:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"speculative_config={mapping!r} must be a dict such as {{'method': 'ngram', ...}}")
    method = mapping.get("method")
    if not isinstance(method, str):
        raise ConfigError(
            f"speculative_config names no method (method={method!r}): give one that `spec-decode plugins` lists"
        )
    return SpeculativeConfig.from_mapping(mapping, plugins.proposer(method).config)


def _load_tokenizer(name: str | Path, *, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a broken file makes transformers raise
        raise ConfigError(
            f"the tokenizer of {str(name)!r} cannot be loaded: {error}. Name another with tokenizer=..., or pass "
            f"skip_tokenizer_init=True and give prompts as token ids"
        ) from error


def _output(request: Request, prompt: str | None) -> RequestOutput:
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens].tolist(),
        outputs=[
            CompletionOutput(
                index=0,
                text=request.text.text if request.text is not None else "",
                token_ids=request.output_token_ids,
                finish_reason=str(request.finish_reason),
            )
        ],
        speculation=request.counts,
    )
