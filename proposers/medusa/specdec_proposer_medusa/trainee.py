"""Medusa heads in training: their loss and the checkpoint that they save."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from specdec_core import (
    CompatibilityError,
    DraftVocabulary,
    TrainingBatch,
    TrainingTarget,
    most_frequent,
    save_head,
    token_loss,
)
from specdec_proposer_medusa.config import MedusaConfig
from specdec_proposer_medusa.loading import ACCURACIES, TOKEN_MAP, find, load
from specdec_proposer_medusa.module import HeadSizes, MedusaHeads
from specdec_proposer_medusa.recipe import MedusaOptions

NUM_RANKS = 64
"""Of each head's guesses, so many of the likeliest are counted. Large trees are widest at their first level: with 8, a
tree of 63 nodes had an acceptance length of 1.96, and 2.06 with 64."""
MEMORY = 0.99


class MedusaTrainee(nn.Module):
    """Trains Medusa heads while the target stays as it is (Medusa-1; Cai et al. 2024, section 2.2.1).

    At position t of a text, head i predicts token t + 2 + i. Tokens outside the heads' vocabulary are masked. The loss
    is the weighted sum of the heads' cross entropies. With `distill`, these are with the target's distribution over the
    heads' vocabulary, wherever its likeliest token is in there.

    It also measures how often each head is right: from that, the checkpoint's trees are built. Each batch takes away
    1 - MEMORY of what was counted before.
    """

    num_right: torch.Tensor  # float32 [num_heads, NUM_RANKS]: how often each head's n-th likeliest guess was right
    num_guessed: torch.Tensor  # float32 [num_heads]: all tokens

    def __init__(self, options: MedusaOptions, target: TrainingTarget, token_counts: torch.Tensor) -> None:
        super().__init__()
        size, info = options.vocab_size(target.info), target.info
        self._options, self._target = options, target
        self._sizes = HeadSizes(
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            hidden_size=info.hidden_size,
            vocab_size=size,
            num_outputs=options.num_heads,
            has_bias=True,
        )
        self.heads = MedusaHeads(self._sizes)
        ids = most_frequent(token_counts, size)
        self.vocabulary = DraftVocabulary(ids, info.vocab_size)
        self._count_from(torch.zeros(options.num_heads, NUM_RANKS), 0)
        output = target.model.get_output_embeddings()
        with torch.no_grad():  # at first, every head predicts what the target's LM head does
            for layer in self.heads.lm_heads:
                layer.weight.copy_(output.weight[ids.to(output.weight.device)])
            for layer in (layer for head in self.heads.heads for layer in head):
                layer.weight.zero_()
                layer.bias.zero_()

    def _count_from(self, num_right: torch.Tensor, num_guessed: int) -> None:
        self.register_buffer("num_right", num_right)
        self.register_buffer("num_guessed", torch.full((len(num_right),), float(num_guessed)))

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        hidden, counts = batch.features["final"].float(), batch.counts[:, 1:]
        chosen, learned, following = self._following(batch)
        total, metrics = hidden.new_zeros(()), {}
        for i in range(min(self._sizes.num_heads, counts.shape[1] - 1)):
            logits, later = self.heads.logits(i, self.heads.hidden(i, hidden[:, : -2 - i])), slice(1 + i, None)
            is_learned = counts[:, later] & (learned[:, later] >= 0)
            loss, metrics[f"accuracy_{i}"] = token_loss(logits, following[:, later], is_learned)
            metrics[f"loss_{i}"] = loss
            total = total + self._options.decay**i * loss
            if self.training:
                self._count(i, logits, chosen[:, later], counts[:, later])
        return total, metrics

    @torch.no_grad()
    def _following(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three things about the token after each position but the last: the target's likeliest one and the one
        that the heads learn, as indices in their vocabulary, int64 [batch, length - 1], -1 where it is not in there;
        and what they learn about it: an index, or probabilities, float32 [batch, length - 1, draft_vocab]."""
        learned = self.vocabulary(batch.token_ids[:, 1:])
        if not (self._options.distill or self.training):
            return learned, learned, learned.clamp(min=0)
        logits = self._target.output_head(batch.features["final"])[:, :-1]
        chosen = self.vocabulary(logits.argmax(-1))
        if not self._options.distill:
            return chosen, learned, learned.clamp(min=0)
        return chosen, chosen, logits[..., self.vocabulary.target_ids].softmax(-1, dtype=torch.float32)

    @torch.no_grad()
    def _count(self, i: int, logits: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> None:
        """Count what head i is right about. chosen: the target's tokens; counts: where they count, both [batch, n]."""
        guesses = logits.topk(min(NUM_RANKS, logits.shape[-1]), dim=-1).indices
        is_right = (guesses == chosen.unsqueeze(-1)) & counts.unsqueeze(-1)
        for counted, new in ((self.num_right[i, : is_right.shape[-1]], is_right), (self.num_guessed[i], counts)):
            counted.mul_(MEMORY).add_(new.sum((0, 1)))

    def load(self, model: str) -> Mapping[str, Any]:
        info = self._target.info
        found = find(MedusaConfig(model=model), info, num_speculative_tokens=1)
        self._sizes = sizes = found.sizes
        if sizes.num_outputs != sizes.num_heads:
            raise CompatibilityError(
                f"the {sizes.num_heads} Medusa heads in {model!r} have {sizes.num_outputs} LM heads of their own, and "
                f"only heads with one each are trained: start from others"
            )
        self.heads, ids = load(found, evolve(info, dtype=torch.float32))
        self.heads.requires_grad_(True)
        self.vocabulary = DraftVocabulary(torch.arange(info.vocab_size) if ids is None else ids, info.vocab_size)
        stored, known = found.checkpoint.config.get(ACCURACIES) or [], torch.zeros(sizes.num_heads, NUM_RANKS)
        for row, shares in zip(known, stored, strict=False):
            row[: len(shares)] = torch.tensor(shares[:NUM_RANKS])
        self._count_from(known, min(1, len(stored)))  # as of one token: the first batch replaces them
        size = len(self.vocabulary.target_ids)
        return {"num_heads": sizes.num_heads, "num_layers": sizes.num_layers, "truncated_vocab_size": size}

    def save(self, folder: Path) -> None:
        """Write the heads in vLLM's layout, which has a place for a truncated vocabulary."""
        info, ids = self._target.info, self.vocabulary.target_ids
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": info.hidden_size,
            "vocab_size": info.vocab_size,
            "num_heads": self._sizes.num_heads,
            "num_hidden_layers": self._sizes.num_layers,
            "medusa_fc_bias": self._sizes.has_bias,
            "truncated_vocab_size": len(ids) if len(ids) < info.vocab_size else None,
        }
        tensors = {f"lm_heads.{i}.weight": layer.weight for i, layer in enumerate(self.heads.lm_heads)}
        for i, head in enumerate(self.heads.heads):
            for j, layer in enumerate(head):
                tensors |= {f"blocks.{i}.layers.{j}.{kind}": tensor for kind, tensor in layer.named_parameters()}
        if self._sizes.logit_scale != 1:
            config["logit_scale"] = self._sizes.logit_scale
        if self.num_guessed.any():
            accuracies = self.num_right / self.num_guessed.clamp(min=1e-6).unsqueeze(1)
            falling = accuracies.sort(descending=True).values.tolist()
            config[ACCURACIES] = [[floor(1e4 * share) / 1e4 for share in each] for each in falling]
        if len(ids) < info.vocab_size:
            tensors[TOKEN_MAP] = ids
        save_head(folder, self._target, config, tensors)
