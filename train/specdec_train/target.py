"""The target, frozen, and what it computes for a batch of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec_core import ConfigError, TrainingTarget
from specdec_core.target.ends import Ends, recording_ends
from specdec_core.target.load import default_device, load_config, parse_dtype, resolve_model
from specdec_core.target.model import target_info_of


def load_target(name: str, dtype: str = "auto", device: str | None = None) -> TrainingTarget:
    """Raises ConfigError or CompatibilityError if it cannot be loaded."""
    path = resolve_model(name)
    try:
        where = torch.device(device) if device else default_device()
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not known: give cpu or cuda") from error
    config = load_config(path, trust_remote_code=False)
    torch_dtype = parse_dtype(dtype, where)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch_dtype)
    except Exception as error:  # whatever a broken file makes its reader raise
        raise ConfigError(f"the weights of {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    model.to(where).eval().requires_grad_(False)
    info = target_info_of(path, config, torch_dtype, where, None)
    with torch.no_grad(), recording_ends(model, model.base_model) as record:
        model(torch.arange(2, device=where)[None], use_cache=False)
    ends = Ends.of(record, config.get_text_config())

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        return ends.embed(model.get_input_embeddings(), token_ids)

    def output_head(hidden: torch.Tensor) -> torch.Tensor:
        return ends.logits(model.get_output_embeddings(), hidden)

    return TrainingTarget(info, config.get_text_config(), model, embed, output_head)


@torch.no_grad()
def features_of(target: TrainingTarget, token_ids: torch.Tensor, taps: Sequence[str]) -> dict[str, torch.Tensor]:
    """{tap: [batch, length, width]} for int64 token_ids [batch, length], padded at the ends: what is padded is seen by
    nothing before it."""
    model: Any = target.model.base_model
    output = model(token_ids, use_cache=False, output_hidden_states=any(tap != "final" for tap in taps))
    found = {"final": output.last_hidden_state}
    return {tap: found[tap] if tap in found else output.hidden_states[int(tap.partition(".")[2])] for tap in taps}
