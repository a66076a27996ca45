"""The configuration of an EAGLE head, read from its config.json and the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any

from attrs import frozen
from transformers import LlamaConfig

from specdec_core import CompatibilityError, TargetInfo, check_target_sizes, config_value, flag, shown
from specdec_proposer_eagle.published import aux_layers

Shapes = Mapping[str, tuple[int, ...]]
NESTED = ("transformer_layer_config", "eagle_config")
"""Keys of config.json that hold a nested part of the configuration, in `speculators` and in EAGLE's own heads."""

ALIGNED = "output_is_target_feature"
"""Key of config.json, written by `spec-decode train`: the target's LM head can read the head's outputs."""

TABLES = frozenset({"d2t", "t2d"})
"""Tensors that map the draft's vocabulary to the target's, and back."""


@frozen(eq=False)
class HeadConfig:
    """The architecture of an EAGLE head.

    layer: sizes, norms and rotary embedding of the head's decoder layers.
    shapes: shapes of the head's tensors, by the parameter names of `modules.Head`. The head has an optional module only
        if this module's tensors are listed.
    """

    is_eagle3: bool
    layer: LlamaConfig
    shapes: Shapes
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]  # layers of the target whose inputs the head reads; (): the last hidden states
    norm_before_residual: bool
    norm_output: bool
    is_aligned: bool = False  # the target's LM head can read the head's outputs

    def has(self, name: str) -> bool:
        return name in self.shapes

    @property
    def has_all_tokens(self) -> bool:
        return self.draft_vocab_size == self.vocab_size

    @property
    def taps(self) -> tuple[str, ...]:
        return tuple(f"input.{i}" for i in self.aux_layer_ids) or ("final",)

    @property
    def feature_size(self) -> int:
        """Width of the head's input from the target: the hidden states of one or several layers, concatenated."""
        return self.target_hidden_size * max(1, len(self.aux_layer_ids))


def our_name(published: str) -> str:
    return published.replace("midlayer.", "layers.0.", 1) if published.startswith("midlayer.") else published


def read(config: Mapping[str, Any], shapes: Shapes, target: TargetInfo, *, is_eagle3: bool) -> HeadConfig:
    """Read the architecture of a published head.

    config: the contents of config.json.
    shapes: shapes of all tensors in the checkpoint, by their published names.

    Raises CompatibilityError if the configuration is not valid or the head was trained for another target, and for
    values that transformers refuses any other exception.
    """
    flat = flatten(config)
    ours = {our_name(name): shape for name, shape in shapes.items() if name not in TABLES}
    layer = _layer_config(flat)
    layers = {match[0] for name in ours if (match := re.match(r"layers\.\d+\.", name))}
    aux_layer_ids = _aux_layer_ids(config, flat, target.num_layers) if is_eagle3 else ()
    head = HeadConfig(
        is_eagle3=is_eagle3,
        layer=layer,
        shapes=ours,
        num_layers=max(1, len(layers)),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=_length(ours["lm_head.weight"]) if "lm_head.weight" in ours else target.vocab_size,
        aux_layer_ids=aux_layer_ids,
        norm_before_residual=config_value(flat, "norm_before_residual", flag, False),
        norm_output=config_value(flat, "norm_output", flag, False),
        is_aligned=config_value(flat, ALIGNED, flag, False),
    )
    if not head.draft_vocab_size:
        raise CompatibilityError(
            f"lm_head.weight of the draft head has the shape {list(ours['lm_head.weight'])}, and should have [tokens, "
            f"hidden_size]: download or save it again"
        )
    sizes = {
        "target_hidden_size": (flat.get("target_hidden_size"), target.hidden_size),
        "vocab_size": (flat.get("vocab_size"), target.vocab_size),
        "the length of t2d": (_length(shapes["t2d"]) if "t2d" in shapes else None, target.vocab_size),
    }
    check_target_sizes(target, sizes)
    return head


def _length(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's configuration as one flat dict. The keys of the nested mappings, which are listed in NESTED, move
    to the top level; keys that are already there take precedence. Raises CompatibilityError if one of the nested values
    is not a mapping."""
    flat: dict[str, Any] = {}
    for name in NESTED:
        part = config.get(name) or {}
        if not isinstance(part, Mapping):
            raise CompatibilityError(
                f"{name} of the draft head's config.json is {shown(part)}, and should be a mapping: download or save "
                f"it again"
            )
        flat |= part
    return flat | {key: value for key, value in config.items() if key not in NESTED}


def _layer_config(flat: Mapping[str, Any]) -> LlamaConfig:
    known = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    known += ("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "mlp_bias")
    given = {key: flat[key] for key in known if flat.get(key) is not None}
    missing = [key for key in known[:3] if key not in given]
    if missing:
        raise CompatibilityError(
            f"the draft head's config.json lacks {', '.join(missing)}: it is not an EAGLE head. Name the method that "
            f"it is for"
        )
    layer = LlamaConfig(**given)
    theta = (getattr(layer, "rope_parameters", None) or {}).get("rope_theta", 1.0)
    if not (0 < theta < inf and 0 <= layer.rms_norm_eps < inf):
        raise ValueError(f"rope_theta is {theta} and rms_norm_eps {layer.rms_norm_eps}")
    return layer


def _aux_layer_ids(config: Mapping[str, Any], flat: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the indices of the target's layers whose inputs the head reads.

    Two conventions are in use. Ids at the top level of config.json name layers whose inputs are read. Ids in
    `eagle_config`, as SpecForge writes them, name layers whose outputs are read, which are the inputs of the next
    layers.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ids = aux_layers(num_layers) if nested is None else _following(nested)
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int and 0 <= i <= num_layers for i in ids):
        raise CompatibilityError(
            f"the draft head reads the inputs of layers {shown(ids)}, and must read a list of numbers from 0 to "
            f"{num_layers}, since the target has {num_layers} layers: it was trained for another target, or its "
            f"config.json lacks eagle_aux_hidden_state_layer_ids"
        )
    return tuple(ids)


def _following(ids: Any) -> Any:
    """Add 1 to each layer id: the output of a layer is the input of the next one. Invalid values are returned
    unchanged, and `_aux_layer_ids` refuses them."""
    return [i + 1 if type(i) is int else i for i in ids] if isinstance(ids, list) else ids
