"""One call of `generate`: plain decoding, in which a forward pass may give the logits of several next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from specdec_core import ConfigError, DraftCounts, TokenDrafter, TokenRequest

ELSEWHERE = "leave custom_generate out"


class Decoding:
    """Generates the tokens of one prompt.

    Each token is drawn as in `generate`: by the same calls of the same logits processors on its own row of logits, and
    by one draw of torch's generator. While the drawn token is the next draft token, the next row of the same forward
    pass is that of plain decoding, too. So drafts only decide how many forward passes there are.

    input_ids: int64 [1, num_tokens]. The other arguments: as `generate` hands them to a decoding method.

    counts: the drafts and how many of their tokens were accepted.
    num_forward_passes: the prompt's included.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self._model, self._input_ids, self._model_kwargs = model, input_ids, model_kwargs
        self._process, self._stops, self._config = logits_processor, stopping_criteria, generation_config
        self._streamer, self._name = streamer, type(model).__name__
        returns = generation_config.return_dict_in_generate
        self._scores: tuple[torch.Tensor, ...] | None = () if returns and generation_config.output_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if returns and generation_config.output_logits else None
        self.counts, self.num_forward_passes = DraftCounts(), 0

    def run(self, drafter: TokenDrafter, request: TokenRequest) -> Any:
        """Generate until a stopping criterion holds. Returns what `generate` returns.

        request: has the prompt, and gets the output.
        """
        drafter.start(request)
        reason = "error"
        try:
            self._generate(drafter, request)
            reason = "length" if self._num_left == 0 else "stop"
        finally:
            drafter.finish(request, reason)
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self._input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self._input_ids,
            scores=self._scores,
            logits=self._logits,
            past_key_values=self._model_kwargs["past_key_values"],
        )

    @property
    def _num_left(self) -> int:
        """How many more tokens may be generated."""
        return int(self._config.max_length) - self._input_ids.shape[1]

    def _generate(self, drafter: TokenDrafter, request: TokenRequest) -> None:
        outputs = self._model._prefill(self._input_ids, self._config, self._model_kwargs)
        self.num_forward_passes += 1
        cache = getattr(outputs, "past_key_values", None)
        if cache is None or not cache.is_croppable:
            raise ConfigError(f"{self._name} keeps states that rejected tokens cannot be removed from: {ELSEWHERE}")
        if any(hasattr(layer, "indexer_keys") for layer in cache.layers):
            raise ConfigError(f"{self._name} has sparse attention, which may choose other keys for drafts: {ELSEWHERE}")
        was_recording = [getattr(layer, "record_past", None) for layer in cache.layers]
        cache.activate_past_recording()
        try:
            with self._model._optimize_model_for_decode():
                draft: Sequence[int] = []
                while not self._emit(outputs, draft, request):
                    (draft,) = drafter.propose_chains([request], [self._num_left - 1])
                    outputs = self._forward(outputs, draft)
        finally:
            for layer, was in zip(cache.layers, was_recording, strict=True):
                if was is not None:
                    layer.record_past = was

    def _forward(self, outputs: Any, draft: Sequence[int]) -> Any:
        """Run a forward pass over the last token and the draft tokens. outputs: of the last one."""
        kwargs, token_ids = dict(self._model_kwargs), self._input_ids
        if draft:
            token_ids = torch.cat([token_ids, token_ids.new_tensor([draft])], dim=-1)
        for _ in draft:
            kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs)
        inputs = self._model.prepare_inputs_for_generation(token_ids, next_sequence_length=1 + len(draft), **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1 + len(draft)
        self.num_forward_passes += 1
        return self._model(**inputs, return_dict=True)

    def _emit(self, outputs: Any, draft: Sequence[int], request: TokenRequest) -> bool:
        """Draw the tokens that a forward pass gives: the one after its last known token, and another one after each
        draft token that is accepted. Returns whether a stopping criterion holds."""
        num_accepted, is_done = 0, False
        rows = outputs.logits[:, -1 - len(draft) :]
        while True:
            token_id = self._draw(rows[:, num_accepted])
            request.append([token_id])
            self._model_kwargs = self._model._update_model_kwargs_for_generation(outputs, self._model_kwargs)
            is_done = bool(self._stops(self._input_ids, self._scores).all())
            if is_done or num_accepted == len(draft) or token_id != draft[num_accepted]:
                break
            num_accepted += 1
        outputs.past_key_values.crop(num_accepted - len(draft))
        if draft:
            self.counts.add(len(draft), num_accepted)
        return is_done

    def _draw(self, logits: torch.Tensor) -> int:
        """Draw the next token as `generate` does, from float [1, vocab], and append it."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self._input_ids.device)
        scores = self._process(self._input_ids, logits)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)
        if self._config.do_sample:
            tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        self._input_ids = torch.cat([self._input_ids, tokens[:, None]], dim=-1)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return int(tokens)
