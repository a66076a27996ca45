"""Finding, checking and loading the MTP modules of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from attrs import evolve, frozen

from specdec_core import (
    Checkpoint,
    CompatibilityError,
    ConfigError,
    KVLayout,
    TargetInfo,
    check_target_sizes,
    config_value,
    shown,
    whole_number,
)
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.families import BY_NAME, REFUSED, Family
from specdec_proposer_mtp.module import MTPModule, kv_layout

Rename = Callable[[str], str | None]


@frozen(eq=False)
class Found:
    """MTP modules that were found and checked; their weights are not loaded yet.

    max_model_len: the longest text that the modules were trained for, as config.json has it, else the target's.
    num_modules: how many the checkpoint has.
    num_depths: how many KV caches there are, with a module for each. With one module, 1: it drafts all tokens. With
        several, the depth of the drafts: the token at depth k is drafted by module (k - 1) mod num_modules.
    """

    family: Family
    config: Any  # transformers' configuration of a decoder layer
    checkpoint: Checkpoint
    kv_layout: KVLayout
    num_weights: int
    num_layers: int  # of the target
    stated: dict[str, Any]  # the checkpoint's config.json, or its part for the text model
    max_model_len: int
    num_modules: int
    num_depths: int


def find(options: MTPConfig, target: TargetInfo, num_speculative_tokens: int) -> Found:
    """Find the MTP modules in the target's checkpoint, or in the one that the options name, and check the shapes of
    their tensors, without loading weights.

    Raises ConfigError if the checkpoint cannot be found or has several modules of which the drafts' depth is no
    multiple, CompatibilityError if it has no module that is supported.
    """
    options.check(num_speculative_tokens)
    own = options.model is None
    checkpoint = Checkpoint(str(target.model if own else options.model), target.revision if own else options.revision)
    stated = _text_config(checkpoint)
    family = family_of(checkpoint.name, stated.get("model_type"))
    with checkpoint.reading_config():
        # LongCat has no such key, and its names have no number of a layer.
        num_layers = config_value(stated, "num_hidden_layers", whole_number(0), 0)
        sizes = {key: config_value(stated, key, whole_number(1)) for key in ("hidden_size", "vocab_size")}
        check_target_sizes(target, {key: (number, getattr(target, key)) for key, number in sizes.items()})
        longest = config_value(stated, "max_position_embeddings", whole_number(1), target.max_model_len)
        # A config.json that says nothing, or 0, may be of a checkpoint with one.
        key = family.num_modules
        num_modules = 1 if key is None else max(1, config_value(stated, key, whole_number(0), 1))
    depth = options.shape(num_speculative_tokens).depth
    indices = range(min(num_modules, depth))
    _check_modules(checkpoint, family, num_layers, num_modules, indices)
    _check_depth(checkpoint.name, num_speculative_tokens, depth, num_modules)
    if checkpoint.config.get("quantization_config"):
        raise CompatibilityError(
            f"the checkpoint {checkpoint.name!r} is quantized, and quantized MTP modules are not supported: use one in "
            f"bfloat16"
        )
    num_depths = 1 if num_modules == 1 else depth
    names = [
        (names_in_module(family, num_layers, index), published_names(family, num_layers, index)) for index in indices
    ]
    outline = checkpoint.outline(lambda: MTPModule(family, layer_config(family, stated)), *names[0])
    for rename, publish in names[1:]:
        checkpoint.check_shapes(outline, rename, publish)
    # Packed for a CPU, weights that several depths share are there several times.
    num_weights = num_depths * sum(each.numel() for each in outline.parameters())
    layout = evolve(kv_layout(outline.config, target.dtype), num_layers=num_depths)
    return Found(
        family=family,
        config=outline.config,
        checkpoint=checkpoint,
        kv_layout=layout,
        num_weights=num_weights,
        num_layers=num_layers,
        stated=stated,
        max_model_len=longest,
        num_modules=num_modules,
        num_depths=num_depths,
    )


def _check_depth(name: str, num_speculative_tokens: int, depth: int, num_modules: int) -> None:
    """Raise ConfigError if drafts are deeper than there are modules, and no multiple. name: of the checkpoint."""
    if depth > num_modules and depth % num_modules:
        below = depth - depth % num_modules
        raise ConfigError(
            f"with num_speculative_tokens={num_speculative_tokens}, drafts are {depth} tokens deep, and {name!r} has "
            f"{num_modules} MTP modules, which draft one token each in turn: draft up to {num_modules} tokens in a "
            f"row, or a multiple of {num_modules}, as are {below} and {below + num_modules}"
        )


def _check_modules(
    checkpoint: Checkpoint, family: Family, num_layers: int, num_modules: int, indices: Iterable[int]
) -> None:
    """Raise CompatibilityError if the checkpoint lacks one of the modules with these indices.

    num_modules: how many it should have.
    """
    for index in indices:
        missing = family.part("proj", num_layers, index) + ".weight"
        if missing in checkpoint.shapes:
            continue
        if index:
            raise CompatibilityError(
                f"{family.num_modules} in config.json of {checkpoint.name!r} is {num_modules}, but its weights lack "
                f"MTP module {index + 1}: {missing} is not in them. Download it again, or set {family.num_modules} to "
                f"{index}, the number of modules that it has"
            )
        raise CompatibilityError(
            f"the checkpoint {checkpoint.name!r} has no MTP module: {missing} is not in it. Name a checkpoint that has "
            f"one as model, or train one: spec-decode train mtp"
        )


def load(found: Found, target: TargetInfo, attn_implementation: str) -> list[MTPModule]:
    """Load the weights of MTP modules in the target's dtype and onto its device. Returns a module for each depth, with
    its own layer of the KV cache. Where the drafts are deeper than there are modules, some share their weights.

    attn_implementation: the name of the attention function that the decoder layers call.
    """
    found.config._attn_implementation = attn_implementation
    modules: list[MTPModule] = []
    for depth in range(found.num_depths):
        if depth < found.num_modules:
            module = MTPModule(found.family, found.config)
            rename = names_in_module(found.family, found.num_layers, depth)
            found.checkpoint.load_into(module, rename, dtype=target.dtype, device=target.device)
        else:
            source = modules[depth - found.num_modules]
            shared = (found.family, *source.parameters(), *source.buffers())
            module = deepcopy(source, {id(each): each for each in shared})
        module.stack.first = depth
        modules.append(module)
    return modules


def names_in_module(family: Family, num_layers: int, index: int = 0) -> Rename:
    """Return a function from a tensor's published name to its name in `MTPModule`; None for a tensor that is not part
    of the module. index: the module's, from 0."""
    parts = [(family.part(ours, num_layers, index) + ".", ours + ".") for ours in family.names]
    parts.sort(key=lambda part: len(part[0]), reverse=True)  # "model.layers.61.enorm." before "model.layers.61."
    copies = tuple(name.format(layer=num_layers + index) + "." for name in family.copies)

    def name_in_module(published: str) -> str | None:
        if published.startswith(copies):
            return None
        return next((ours + published[len(start) :] for start, ours in parts if published.startswith(start)), None)

    return name_in_module


def published_names(family: Family, num_layers: int, index: int = 0) -> Callable[[str], str]:
    """Return a function from a tensor's name in `MTPModule` to its published name. index: the module's, from 0."""
    parts = [(ours + ".", family.part(ours, num_layers, index) + ".") for ours in family.names]
    parts.sort(key=lambda part: len(part[0]), reverse=True)  # "block.mlp." before "block."
    return lambda name: next(published + name[len(ours) :] for ours, published in parts if name.startswith(ours))


def family_of(name: str, model_type: object) -> Family:
    """Return the row of a model family. Raises CompatibilityError if there is none.

    name: of the checkpoint, for the error message.
    """
    if isinstance(model_type, str) and model_type in REFUSED:
        raise CompatibilityError(
            f"multi-token prediction of {shown(model_type)} is not supported: {REFUSED[model_type]}. Choose another "
            f"method"
        )
    if not isinstance(model_type, str) or model_type not in BY_NAME:
        raise CompatibilityError(
            f"{name!r} is of type {shown(model_type)}, and multi-token prediction is known for {', '.join(BY_NAME)}: "
            f"choose another method"
        )
    return BY_NAME[model_type]


def layer_config(family: Family, stated: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of the module's decoder layer.

    stated: the target's config.json, or its part for the text model. transformers raises many types of errors for
        values that are not valid.
    """
    kind = family.of_transformers("configuration", "Config")
    values = {key: value for key, value in stated.items() if key not in ("model_type", "layer_types", "auto_map")}
    config = kind(**values | {"num_hidden_layers": 1} | dict(family.config))
    config._experts_implementation = "eager"  # transformers chooses one for whole models only
    return config


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config.json, or its part for the text model."""
    found = checkpoint.config.get("text_config") or checkpoint.config
    if not isinstance(found, dict):
        raise CompatibilityError(
            f"text_config in config.json of {checkpoint.name!r} is {shown(found)}, not an object: download or save it "
            f"again"
        )
    return found
