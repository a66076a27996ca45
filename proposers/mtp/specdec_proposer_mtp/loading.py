"""Finding, checking and loading the MTP module of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from attrs import frozen

from specdec_core import Checkpoint, CompatibilityError, KVLayout, TargetInfo, shown
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.families import FAMILIES, REFUSED, Family
from specdec_proposer_mtp.module import MTPModule, kv_layout

Rename = Callable[[str], str | None]


@frozen(eq=False)
class Found:
    """An MTP module that was found and checked; its weights are not loaded yet."""

    family: Family
    config: Any  # transformers' configuration of the decoder layer
    checkpoint: Checkpoint
    kv_layout: KVLayout
    num_weights: int
    num_layers: int  # of the target
    stated: dict[str, Any]  # the checkpoint's config.json, or its part for the text model


def find(options: MTPConfig, target: TargetInfo, num_speculative_tokens: int) -> Found:
    """Find the MTP module in the target's checkpoint, or in the one that the options name, and check the shapes of its
    tensors, without loading weights.

    Raises ConfigError if the checkpoint cannot be found, CompatibilityError if it has no module that is supported.
    """
    options.check(num_speculative_tokens)
    own = options.model is None
    checkpoint = Checkpoint(str(target.model if own else options.model), target.revision if own else options.revision)
    stated = checkpoint.config.get("text_config") or checkpoint.config
    family = family_of(checkpoint.name, stated.get("model_type"))
    num_layers = stated.get("num_hidden_layers")
    if (stated.get("hidden_size"), stated.get("vocab_size")) != (target.hidden_size, target.vocab_size):
        raise CompatibilityError(
            f"the MTP module in {checkpoint.name!r} is for another target: hidden_size and vocab_size are "
            f"{shown(stated.get('hidden_size'))} and {shown(stated.get('vocab_size'))}, and this target's are "
            f"{target.hidden_size} and {target.vocab_size}. Leave model out to use the target's own"
        )
    _check_number(checkpoint.name, stated.get(family.num_modules, 1) if family.num_modules else 1)
    if checkpoint.config.get("quantization_config"):
        raise CompatibilityError(
            f"the checkpoint {checkpoint.name!r} is quantized, and quantized MTP modules are not supported: use one in "
            f"bfloat16"
        )
    rename = names_in_module(family, num_layers)
    if not any(rename(name) == "proj.weight" for name in checkpoint.shapes):
        raise CompatibilityError(
            f"the checkpoint {checkpoint.name!r} has no MTP module: {_first_name(family, num_layers)} is not in it. "
            f"Name a checkpoint that has one as model, or choose another method"
        )
    config = layer_config(checkpoint.name, family, stated)
    with torch.device("meta"):
        outline = MTPModule(family, config)
    checkpoint.check_shapes(outline, rename)
    num_weights = sum(each.numel() for each in outline.parameters())
    return Found(family, config, checkpoint, kv_layout(config, target.dtype), num_weights, num_layers, stated)


def load(found: Found, target: TargetInfo, attn_implementation: str) -> MTPModule:
    """Load an MTP module's weights in the target's dtype and onto its device.

    attn_implementation: the name of the attention function that its decoder layer calls.
    """
    found.config._attn_implementation = attn_implementation
    module = MTPModule(found.family, found.config)
    rename = names_in_module(found.family, found.num_layers)
    found.checkpoint.load_into(module, rename, dtype=target.dtype, device=target.device)
    return module


def names_in_module(family: Family, num_layers: int) -> Rename:
    """Return a function from a tensor's published name to its name in `MTPModule`; None for a tensor that is not part
    of the module."""
    parts = [(published.format(layer=num_layers) + ".", ours + ".") for ours, published in family.names.items()]
    parts.sort(key=lambda part: len(part[0]), reverse=True)  # "model.layers.61.enorm." before "model.layers.61."
    copies = tuple(name.format(layer=num_layers) + "." for name in family.copies)

    def name_in_module(published: str) -> str | None:
        if published.startswith(copies or ("\0",)):
            return None
        return next((ours + published[len(start) :] for start, ours in parts if published.startswith(start)), None)

    return name_in_module


def published_names(family: Family, num_layers: int) -> Callable[[str], str]:
    """Return a function from a tensor's name in `MTPModule` to its published name."""
    parts = [(ours + ".", published.format(layer=num_layers) + ".") for ours, published in family.names.items()]
    parts.sort(key=lambda part: len(part[0]), reverse=True)  # "block.mlp." before "block."
    return lambda name: next(published + name[len(ours) :] for ours, published in parts if name.startswith(ours))


def family_of(name: str, model_type: object) -> Family:
    """Return the row of a model family. Raises CompatibilityError if there is none.

    name: of the checkpoint, for the error message.
    """
    known = {family.name: family for family in FAMILIES}
    if model_type in REFUSED:
        raise CompatibilityError(
            f"multi-token prediction of {shown(model_type)} is not supported: {REFUSED[str(model_type)]}. Choose "
            f"another method"
        )
    if not isinstance(model_type, str) or model_type not in known:
        raise CompatibilityError(
            f"{name!r} is of type {shown(model_type)}, and multi-token prediction is known for {', '.join(known)}: "
            f"choose another method"
        )
    return known[model_type]


def layer_config(name: str, family: Family, stated: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of the module's decoder layer.

    stated: the target's config.json, or its part for the text model.

    Raises CompatibilityError if transformers refuses a value.
    """
    module, _, prefix = family.classes.partition(".")
    kind = getattr(import_module(f"transformers.models.{module}.configuration_{module}"), prefix + "Config")
    values = {key: value for key, value in stated.items() if key not in ("model_type", "layer_types", "auto_map")}
    try:
        config = kind(**values | {"num_hidden_layers": 1} | dict(family.config))
        config._experts_implementation = "eager"  # transformers chooses one for whole models only
        return config
    except Exception as error:  # transformers raises many types for invalid values
        raise CompatibilityError(
            f"config.json of {name!r} is not valid: {type(error).__name__}: {error}. Download or save it again"
        ) from error


def _check_number(name: str, num_modules: object) -> None:
    if num_modules not in (0, 1):
        raise CompatibilityError(
            f"{name!r} has {shown(num_modules)} MTP modules, and only one that drafts all tokens is supported: choose "
            f"another method"
        )


def _first_name(family: Family, num_layers: int) -> str:
    return family.names["proj"].format(layer=num_layers) + ".weight"
