"""What users give to `generate` as `custom_generate`."""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any, Self
from weakref import finalize

import torch

from specdec_core import ConfigError, DraftCounts, Plugins, TargetInfo, TokenDrafter, TokenRequest
from specdec_transformers.decoding import Decoding
from specdec_transformers.refusals import refuse_unsupported

GENERATE = "transformers.generation.utils", "generate"
"""The module and the name of the function that calls a `custom_generate`."""


def speculative(speculative_config: Any, *, plugins: Plugins | None = None) -> Speculation:
    """Draft with an installed method of specdec in `model.generate(..., custom_generate=speculative(...))`.

    speculative_config: as `specdec_core.LLM` takes it, such as {"method": "suffix", "num_speculative_tokens": 8}. The
        method must need nothing of the target but its tokens.
    plugins: None: those that are installed.
    """
    return Speculation(speculative_config, plugins)


class Speculation:
    """One drafting method, for any number of calls of one model's `generate`, one at a time. Methods that learn from
    outputs, such as suffix, draft from those of earlier calls, too.

    counts: the drafts of the last call, and how many of their tokens were accepted (`DraftCounts`).
    num_forward_passes: of the last call, the prompt's included.

    The method is built in the first call, which raises ConfigError or PluginError if it cannot draft for the model.
    """

    def __init__(self, speculative_config: Any, plugins: Plugins | None = None) -> None:
        self._config, self._plugins = speculative_config, plugins
        self._drafter: TokenDrafter | None = None
        self._target: TargetInfo | None = None
        self._close: finalize[..., Any] | None = None
        self._lock, self._num_calls = Lock(), 0
        self.counts, self.num_forward_passes = DraftCounts(), 0

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        prediction: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate`. Returns what `generate` does without `custom_generate`.

        prediction: token ids of the output that the user expects, for methods that draft from it: a list or a tensor of
            one dimension. `generate` passes it on.

        Raises ConfigError for what is not supported: see `refuse_unsupported`.
        """
        given = _not_handed_over(sys._getframe(1))
        streamer = given.get("streamer") if streamer is None else streamer
        synced_gpus = bool(synced_gpus or given.get("synced_gpus"))
        refuse_unsupported(model, input_ids, generation_config, model_kwargs, synced_gpus, given.get("assistant_model"))
        if not self._lock.acquire(blocking=False):
            raise ConfigError("this speculation drafts for another call of generate: make one for each thread")
        try:
            drafter = self._drafter_for(model)
            self._num_calls += 1
            expected = _checked_prediction(prediction, drafter)
            request = TokenRequest(f"generate-{self._num_calls}", input_ids[0].tolist(), expected)
            decoding = Decoding(
                model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            )
            result = decoding.run(drafter, request)
            self.counts, self.num_forward_passes = decoding.counts, decoding.num_forward_passes
            return result
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Let the method forget the outputs of earlier calls."""
        if self._drafter is not None:
            self._drafter.forget()

    def close(self) -> None:
        """Save what outlives the process, such as the file of suffix's cache. Called by `with`, too, and at the latest
        when the interpreter exits. Afterwards, `generate` builds the method anew."""
        if self._close is not None:
            self._close()
        self._drafter = self._target = self._close = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drafter_for(self, model: Any) -> TokenDrafter:
        target = target_info_of(model)
        if self._drafter is None:
            self._drafter = TokenDrafter(self._config, target, max_num_seqs=1, plugins=self._plugins)
            self._target, self._close = target, finalize(self, self._drafter.close)
        elif target != self._target:
            raise ConfigError(f"this speculation drafts for {self._target}, not for {target}: make one for each model")
        return self._drafter


def target_info_of(model: Any) -> TargetInfo:
    """Facts about a model from transformers."""
    config = model.config.get_text_config()
    return TargetInfo(
        model=model.config.name_or_path or type(model).__name__,
        model_type=model.config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_model_len=getattr(config, "max_position_embeddings", None) or sys.maxsize,
        dtype=model.dtype,
        device=model.device,
    )


def _checked_prediction(prediction: Any, drafter: TokenDrafter) -> list[int]:
    if prediction is None:
        return []
    if not drafter.plan.reads_prediction:
        raise ConfigError(f"method {drafter.config.method!r} does not draft from a prediction: leave prediction out")
    token_ids = torch.as_tensor(prediction, dtype=torch.int64)
    if token_ids.ndim != 1:
        raise ConfigError(f"prediction has the shape {[*token_ids.shape]}: give the token ids of one output")
    return token_ids.tolist()


def _not_handed_over(frame: Any) -> dict[str, Any]:
    """The arguments of `generate` that it gives to its own decoding methods, but to no callable: without them, a
    streamer would wait forever for tokens, and an assistant_model would be ignored. frame: of the caller. Empty if that
    is not `generate`."""
    if (frame.f_globals.get("__name__"), frame.f_code.co_name) != GENERATE:
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "synced_gpus", "assistant_model")}
