"""Loads the target for training a draft model or draft head: transformers' own model, frozen."""

from __future__ import annotations

from functools import partial

import torch

from specdec_core.contracts.training import TrainingTarget
from specdec_core.models.embedding_and_head import EmbeddingAndHead, record_embedding_and_head
from specdec_core.models.load import ModelSource, find_device, load_config
from specdec_core.models.model import target_info_of
from specdec_core.models.weights import load_weights


def load_training_target(name: str, dtype: str = "auto", device: str | None = None) -> TrainingTarget:
    """Load a target model with frozen weights, for training a draft model or draft head.

    name: a folder, a name on the model hub or the name of an embedded model.
    device: None for a GPU if there is one, else the CPU.

    Raises ConfigError or CompatibilityError if the model cannot be loaded.
    """
    source = ModelSource(model=name, device=find_device(device), dtype=dtype)
    config = load_config(source)
    model = load_weights(source, config, attn_implementation=None)
    info = target_info_of(source, config)
    with torch.no_grad(), record_embedding_and_head(model, model.base_model) as record:
        model(torch.arange(2, device=source.device)[None], use_cache=False)
    factors = EmbeddingAndHead.of(record, config.get_text_config())
    embed = partial(factors.embed, model.get_input_embeddings())
    return TrainingTarget(
        info, config.get_text_config(), model, embed, partial(factors.logits, model.get_output_embeddings())
    )
