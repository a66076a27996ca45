"""A trainable draft model: its loss and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specdec_core import (
    CompatibilityError,
    ConfigError,
    EngineConfig,
    TrainingBatch,
    TrainingTarget,
    accuracy,
    load_tokenizer,
    load_training_target,
    soft_cross_entropy,
)
from specdec_proposer_draft.config import DraftConfig
from specdec_proposer_draft.recipe import DraftTrainingOptions
from specdec_proposer_draft.vocabulary import shared_vocabulary

HEAD_DIM = 64


class DraftTrainee(nn.Module):
    """A draft model in training: a small Llama with the target's vocabulary, or a copy of the target's first layers.

    The loss is the cross entropy to the target's next-token distribution, averaged over the unmasked tokens. This
    distribution is mixed with the text's actual next token, which has the weight `hard_weight`.
    """

    def __init__(self, options: DraftTrainingOptions, target: TrainingTarget) -> None:
        super().__init__()
        self._options, self._target = options, target
        self.model = _small(options, target) if options.from_layers is None else _first_layers(options, target)
        self.model.float().train().requires_grad_(True)

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        share, token_ids = self._options.hard_weight, batch.token_ids
        with torch.no_grad():
            wanted = self._target.output_head(batch.features["final"]).float()[:, :-1]
            likeliest, wanted = wanted.argmax(-1), wanted.softmax(-1)
            if share:
                following = token_ids[:, 1:, None]
                wanted = (wanted * (1 - share)).scatter_add_(
                    -1, following, torch.full_like(following, share, dtype=wanted.dtype)
                )
        logits = self.model(token_ids, use_cache=False).logits[:, :-1]
        weight = batch.counts[:, 1:].float()
        weight = weight / weight.sum().clamp(min=1)
        loss = (soft_cross_entropy(logits, wanted) * weight).sum()
        return loss, {"accuracy": accuracy(logits, likeliest, weight)}

    def load(self, model: str) -> Mapping[str, Any]:
        if self._options.from_layers is not None:
            raise ConfigError(
                f"from_layers={self._options.from_layers} copies the target's layers, and the start {model!r} has "
                f"layers of its own: leave either out"
            )
        info = self._target.info
        found = load_training_target(model, "float32", str(info.device))
        if found.info.vocab_size != info.vocab_size:
            raise CompatibilityError(
                f"the draft model {model!r} has {found.info.vocab_size} tokens, and the target {info.vocab_size}: "
                f"start from one with the target's vocabulary"
            )
        shared_vocabulary(DraftConfig(model=model), found.info, info)  # refuses other tokens with the same ids
        self.model = found.model.train().requires_grad_(True)
        names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "tie": "tie_word_embeddings"}
        names |= {name: name for name in ("hidden_size", "intermediate_size")}
        return {option: getattr(found.config, name, None) for option, name in names.items()}

    def save(self, folder: Path) -> None:
        """Save the draft model with `save_pretrained`, and the target's tokenizer beside it if that can be loaded."""
        dtype = getattr(self._target.config, "dtype", None) or torch.float32
        had_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            deepcopy(self.model).to("cpu", dtype).save_pretrained(folder)
        finally:
            if had_bar:
                logging.enable_progress_bar()
        try:
            tokenizer = load_tokenizer(EngineConfig(model=self._target.info.model))
        except ConfigError:
            return
        tokenizer.save_pretrained(folder)


def _small(options: DraftTrainingOptions, target: TrainingTarget) -> Any:
    its = target.config
    size = options.hidden_size or max(2, target.info.hidden_size // 2)
    num_heads = options.num_heads or max(1, size // HEAD_DIM)
    if size % num_heads or size // num_heads % 2:
        raise ConfigError(
            f"hidden_size={size} cannot be divided among num_heads={num_heads} attention heads of an even size: change "
            f"either"
        )
    config = LlamaConfig(
        vocab_size=target.info.vocab_size,
        hidden_size=size,
        intermediate_size=options.intermediate_size or 3 * size,
        num_hidden_layers=options.num_layers or 2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=target.info.max_model_len,
        tie_word_embeddings=options.tie is not False,
        **{name: getattr(its, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    model = LlamaForCausalLM(config)
    _begin_with_embedding(model, target.model)
    return model


@torch.no_grad()
def _begin_with_embedding(model: Any, target: Any) -> None:
    """Initialize a draft model's embedding with the principal components of the target's embedding.

    If the vocabulary is large, most weights of a small model are in its embedding. If they were random, training would
    have to learn each token's row from this token's occurrences alone.
    """
    known = target.get_input_embeddings().weight.float()
    size = min(known.shape[1], model.config.hidden_size)
    _, directions = torch.linalg.eigh(known.T @ known)  # in ascending order of the eigenvalues
    model.get_input_embeddings().weight[:, :size] = known @ directions[:, -size:]


def _first_layers(options: DraftTrainingOptions, target: TrainingTarget) -> Any:
    num_layers = options.from_layers
    assert num_layers is not None
    if num_layers >= target.info.num_layers:
        raise ConfigError(
            f"from_layers={num_layers}, but the target has {target.info.num_layers} layers: a draft needs fewer"
        )
    config = deepcopy(target.model.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:num_layers]
    model = type(target.model)(config)
    wanted, found = model.state_dict(), target.model.state_dict()
    model.load_state_dict({name: found[name] for name in wanted})
    return model
