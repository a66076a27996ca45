"""Computes from scratch what the method `draft_model` must draft.

For each draft token, transformers runs the draft model over the whole sequence, without a KV cache.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import reference
import torch
from attrs import frozen
from probe_recorder import Drafted
from recorded_runs import Expected
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from specdec_core import TokenTree

LOGIT_MARGIN = 1e-3


def with_window(llama: LlamaForCausalLM, window: int) -> MistralForCausalLM:
    """Convert a Llama to a Mistral with equal weights and a sliding window: each token attends only to the last
    `window` positions."""
    config = MistralConfig(**{**llama.config.to_dict(), "model_type": "mistral", "sliding_window": window})
    config._attn_implementation = "eager"
    mistral = MistralForCausalLM(config)
    mistral.load_state_dict(llama.state_dict())
    return mistral.eval()


class Reader:
    """Computes a model's logits without a KV cache, and keeps them by token sequence."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, text: tuple[int, ...]) -> torch.Tensor:
        """Return the logits float64 [vocab] for the token after a token sequence.

        The forward pass also gives the logits after each prefix of the sequence, which are kept for later calls.
        """
        if text not in self._known:
            rows = self.model(torch.tensor([text]), use_cache=False).logits[0].double()
            for i, row in enumerate(rows):
                self._known.setdefault(text[: i + 1], row)
        return self._known[text]


@cache
def reader(model_dir: Path, window: int | None) -> Reader:
    """Return the Reader of a draft model with a sliding window (None: the model's own attention).

    Readers are cached, since many tests need the logits of the same token sequences.
    """
    model = reference.load(model_dir)
    return Reader(model if window is None else with_window(model, window))


@frozen
class Words:
    """How the vocabularies of a target and a draft model correspond.

    stand_in: for each token id of the target, the draft model's token id that replaces it.
    shared: the target's token ids that the draft model can propose, ascending.
    """

    stand_in: list[int]
    shared: list[int]


class DraftModelFromScratch:
    """A callable that takes a recorded draft and returns the draft that the proposer should have made.

    shape: the shape of the draft tree.
    is_sampled: whether draft tokens are sampled at temperatures above 0. Sampled tokens are copied from the recorded
        draft, and only their probabilities are computed.
    words: how the vocabularies of target and draft model correspond; None: they are equal.
    window: how many positions each token attends to; None: all.
    """

    def __init__(
        self,
        model_dir: Path,
        shape: TokenTree,
        *,
        is_sampled: bool,
        words: Words | None = None,
        window: int | None = None,
    ) -> None:
        self.reader = reader(model_dir, window)
        self.shape, self.is_sampled = shape, is_sampled
        size = self.reader.model.config.vocab_size
        self.words = words or Words(list(range(size)), list(range(size)))

    def logits(self, text: list[int]) -> torch.Tensor:
        """Return the draft model's logits after a sequence of the target's token ids: float64 [num_shared], one for
        each token in `words.shared`."""
        logits = self.reader.logits(tuple(self.words.stand_in[token] for token in text))
        return logits[[self.words.stand_in[token] for token in self.words.shared]]

    def _read_ahead(self, drafted: Drafted, text: list[int]) -> None:
        """Compute and cache the logits after a request's whole text, and after each root-to-leaf path of the draft
        tree, with at most one forward pass for each of these sequences."""
        self.logits(text)
        paths: dict[int, list[int]] = {-1: []}
        for number, (token, parent) in enumerate(zip(drafted.token_ids, drafted.parents, strict=True)):
            if parent in paths:  # others are dead
                paths[number] = [*paths[parent], token]
        for number in set(paths) - set(drafted.parents):
            self.logits([*drafted.history, *paths[number]])

    @torch.inference_mode()
    def __call__(self, drafted: Drafted, text: list[int]) -> Expected:
        tokens: list[int] = []
        parents: list[int] = []
        all_probs: list[torch.Tensor | None] = []
        is_clear = True
        numbers: dict[tuple[int, ...], int] = {(): -1}
        self._read_ahead(drafted, text)
        for number, path in enumerate(self.shape.paths[: drafted.max_draft_tokens]):
            numbers[path] = number
            above = [tokens[numbers[path[: i + 1]]] for i in range(len(path) - 1)]
            logits = self.logits([*drafted.history, *above])
            parents.append(numbers[path[:-1]])
            if self.is_sampled and drafted.temperature > 0:
                tokens.append(drafted.token_ids[number])
                all_probs.append((logits / drafted.temperature).softmax(dim=-1))
                continue
            rank = path[-1]
            ordered = logits.sort(descending=True)
            is_clear &= bool((-ordered.values.diff()[max(rank - 1, 0) : rank + 1]).min() > LOGIT_MARGIN)
            tokens.append(self.words.shared[int(ordered.indices[rank])])
            all_probs.append(None)
        return Expected(tokens, parents, all_probs, is_clear)
