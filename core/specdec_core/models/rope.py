"""Makes rotary embeddings independent of how long the requests in a batch are, so that requests do not affect each
other."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec_core.models.families import LENGTH_DEPENDENT_ROPES, TEMPERATURE_TUNING


def pin_positions(model: nn.Module, max_model_len: int) -> None:
    """Make rotary embeddings depend on the position alone, in requests of any length up to max_model_len.

    Rotary embeddings of type longrope use the long factors if max_model_len exceeds original_max_position_embeddings,
    else the short ones. Those of type dynamic use the unscaled frequencies, because max_model_len is never above
    max_position_embeddings.

    Attention temperatures that change with the position are turned off, because transformers would compute them from
    positions in the flat batch and not in the request. At the lengths that `families.check_length` allows, all of them
    are 1 anyway.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in LENGTH_DEPENDENT_ROPES:
            _pin_rope(module, rope_type, max_model_len, None)
            setattr(module, "rope_type", "default")  # noqa: B010   transformers' update reads it in each forward pass
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, each in rope_type.items() if each in LENGTH_DEPENDENT_ROPES]:
                _pin_rope(module, rope_type[layer_type], max_model_len, layer_type)
                rope_type[layer_type] = "default"
        if getattr(module, TEMPERATURE_TUNING, None):
            setattr(module, TEMPERATURE_TUNING, False)


def _pin_rope(module: Any, rope_type: str, max_model_len: int, layer_type: str | None) -> None:
    """Set the rotary frequencies of a module to those for max_model_len.

    layer_type: the layer type whose frequencies to set, in a module that keeps frequencies for each type of layer. None
        for all other modules.
    """
    prefix, by_layer = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    frequencies = getattr(module, f"{prefix}inv_freq")
    pinned, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, frequencies.device, seq_len=max_model_len, **by_layer)
    frequencies.copy_(pinned)
