"""The target that drafts are trained for: transformers' own model, frozen, with what a family does at its two ends."""

from __future__ import annotations

import torch

from specdec_core.target.ends import Ends, recording_ends
from specdec_core.target.load import find_device, load_config, load_weights, parse_dtype, resolve_model
from specdec_core.target.model import target_info_of
from specdec_core.training import TrainingTarget


def load_training_target(name: str, dtype: str = "auto", device: str | None = None) -> TrainingTarget:
    """name: a folder, a name on the hub or an embedded model. device: the default one if None. Raises ConfigError or
    CompatibilityError if it cannot be loaded."""
    path, where = resolve_model(name), find_device(device)
    config = load_config(path, trust_remote_code=False)
    torch_dtype = parse_dtype(dtype, where)
    model = load_weights(path, config, torch_dtype, attn_implementation=None).to(where)
    info = target_info_of(path, config, torch_dtype, where, None)
    with torch.no_grad(), recording_ends(model, model.base_model) as record:
        model(torch.arange(2, device=where)[None], use_cache=False)
    ends = Ends.of(record, config.get_text_config())

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        return ends.embed(model.get_input_embeddings(), token_ids)

    def output_head(hidden: torch.Tensor) -> torch.Tensor:
        return ends.logits(model.get_output_embeddings(), hidden)

    return TrainingTarget(info, config.get_text_config(), model, embed, output_head)
