"""What in a model depends on how long its requests are: pinned, so that requests do not change each other."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec_core.errors import CompatibilityError

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def check_length(text_config: Any, max_model_len: int) -> None:
    """Raise CompatibilityError if the model does something for long requests that the paged cache cannot."""
    limits: list[tuple[int, str]] = []
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        limits.append((text_config.attention_chunk_size, "attention in chunks of attention_chunk_size tokens"))
    if getattr(text_config, "attn_temperature_tuning", None):
        limits.append((text_config.floor_scale - 1, "attention temperatures that change at floor_scale tokens"))
    for limit, feature in limits:
        if max_model_len > limit:
            raise CompatibilityError(
                f"max_model_len={max_model_len} is too long for {text_config.model_type!r} models: they have "
                f"{feature}, which is not supported. Up to {limit} it makes no difference: give "
                f"max_model_len={min(limit for limit, _ in limits)} or less"
            )


def pin_positions(model: nn.Module, max_model_len: int) -> None:
    """Make every position mean the same in requests of any length up to max_model_len.

    longrope: the long factors if max_model_len exceeds original_max_position_embeddings, else the short ones. dynamic:
    the plain frequencies, which hold up to max_position_embeddings, and max_model_len is never more. Attention
    temperatures, which transformers counts along the batch, are 1 up to the limit that `check_length` keeps.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in LENGTH_DEPENDENT_ROPES:
            _pin_rope(module, rope_type, max_model_len, None)
            setattr(module, "rope_type", "default")  # noqa: B010   what transformers' update looks at in each pass
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, each in rope_type.items() if each in LENGTH_DEPENDENT_ROPES]:
                _pin_rope(module, rope_type[layer_type], max_model_len, layer_type)
                rope_type[layer_type] = "default"
        if getattr(module, "attn_temperature_tuning", None):
            setattr(module, "attn_temperature_tuning", False)  # noqa: B010


def _pin_rope(module: Any, rope_type: str, max_model_len: int, layer_type: str | None) -> None:
    """The factor that cos and sin are multiplied with follows from the configuration alone, and stays."""
    prefix, by_layer = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    frequencies = getattr(module, f"{prefix}inv_freq")
    pinned, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, frequencies.device, seq_len=max_model_len, **by_layer)
    frequencies.copy_(pinned)
