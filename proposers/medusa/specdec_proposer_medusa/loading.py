"""Checking and loading the published checkpoints of Medusa heads.

There are two layouts. FasterDecoding's files have the names `{head}.{layer}.linear.weight` and, for the output layer,
`{head}.{num_layers}.weight`. vLLM's have `blocks.{head}.layers.{layer}.weight`, `lm_heads.{head}.weight` and
`token_map`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen

from specdec_core import (
    Checkpoint,
    CompatibilityError,
    ConfigError,
    TargetInfo,
    TokenTree,
    check_target_sizes,
    checked_token_map,
    config_value,
    flag,
    number,
    shown,
)
from specdec_proposer_medusa.choices import VICUNA_7B, Accuracies, choices_from_accuracies
from specdec_proposer_medusa.config import MedusaConfig, parse_accuracies
from specdec_proposer_medusa.module import HeadSizes, MedusaHeads

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIXES = ("medusa_heads.", "medusa_head.")
TOKEN_MAP = "token_map"
LARGEST_SCALE = 1e6
LAYOUTS = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.\2.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"lm_heads.\1.weight"),
    (re.compile(r"lm_head\.weight"), r"lm_heads.0.weight"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
)
"""Published names of tensors, and what they are called in `MedusaHeads`."""
ACCURACIES = "medusa_head_accuracies"  # key of config.json
HEAD = re.compile(r"heads\.(\d+)\.(\d+)\.")


@frozen(eq=False)
class Found:
    """Medusa heads whose checkpoint was found and checked; their weights are not loaded yet."""

    sizes: HeadSizes
    shape: TokenTree
    checkpoint: Checkpoint
    num_weights: int


def name_in_module(published: str) -> str | None:
    name = _without_prefix(published)
    if name == TOKEN_MAP:
        return None
    return next((pattern.sub(ours, name) for pattern, ours in LAYOUTS if pattern.fullmatch(name)), name)


def _without_prefix(published: str) -> str:
    return next((published.removeprefix(prefix) for prefix in PREFIXES if published.startswith(prefix)), published)


def published_name(name: str, sizes: HeadSizes, *, is_vllms: bool) -> str:
    """Return what a tensor of `MedusaHeads` is called in one of the two layouts."""
    if is_vllms:
        return HEAD.sub(r"blocks.\1.layers.\2.", name)
    name = re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{sizes.num_layers}.", name)
    return HEAD.sub(r"\1.\2.linear.", name)


def find(options: MedusaConfig, target: TargetInfo, num_speculative_tokens: int) -> Found:
    """Read the sizes of a checkpoint's heads and check the shapes of its tensors, without loading weights.

    Raises ConfigError if the checkpoint cannot be found or has too few heads for the options, CompatibilityError if it
    does not fit the target or is incomplete.
    """
    checkpoint = _checkpoint(options)
    sizes = _sizes(checkpoint, target)
    if options.tree is not None:
        key = "medusa_choices" if options.speculative_token_tree is None else "speculative_token_tree"
        options.tree.check_number(num_speculative_tokens, key)
    shape = options.tree or _built_tree(options, checkpoint, num_speculative_tokens)
    options.check_depth(shape.depth, sizes.num_heads, f"the checkpoint {checkpoint.name!r}")
    if len(shape.paths) < num_speculative_tokens and options.draft_sample_method == "probabilistic":
        raise ConfigError(
            f"num_speculative_tokens={num_speculative_tokens}, but {checkpoint.name!r} has {sizes.num_heads} Medusa "
            f"heads, and a chain has a token of each: lower it, or leave it out"
        )
    if len(shape.paths) < num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens={num_speculative_tokens}, but the tree built from the accuracies of "
            f"{checkpoint.name!r} has {len(shape.paths)} nodes: lower it, or leave it out"
        )
    publish = partial(published_name, sizes=sizes, is_vllms=_is_vllms(checkpoint))
    outline = checkpoint.outline(lambda: MedusaHeads(sizes), name_in_module, publish)
    return Found(sizes, shape, checkpoint, sum(each.numel() for each in outline.parameters()))


def load(found: Found, target: TargetInfo) -> tuple[MedusaHeads, torch.Tensor | None]:
    """Load the heads' weights in the target's dtype and onto its device.

    Returns the heads and a tensor, int64 [draft_vocab], with the target's id of each token in their vocabulary. The
    tensor is None if the heads have all of the target's tokens.
    """
    module = MedusaHeads(found.sizes)
    found.checkpoint.load_into(module, name_in_module, dtype=target.dtype, device=target.device)
    if found.sizes.num_mapped is None:
        return module, None
    (table,) = found.checkpoint.load([name for name in found.checkpoint.shapes if _is_token_map(name)]).values()
    ids = checked_token_map(table, f"{TOKEN_MAP} of {found.checkpoint.name!r}", target.vocab_size).to(target.device)
    module.keep_tokens(ids)
    return module, ids


def built_tree(options: MedusaConfig, num_nodes: int) -> TokenTree:
    """Return a tree built from the accuracies of the heads, or a chain if tokens are sampled; of at most num_nodes
    draft tokens. Raises ConfigError or CompatibilityError if the checkpoint cannot be read."""
    return _built_tree(options, _checkpoint(options), num_nodes)


def _built_tree(options: MedusaConfig, checkpoint: Checkpoint, num_nodes: int) -> TokenTree:
    num_heads = _num_heads(checkpoint)
    if options.draft_sample_method == "probabilistic":
        return TokenTree.chain(min(num_nodes, num_heads))
    accuracies = options.medusa_head_accuracies
    if accuracies is not None:
        _check_one_for_each(accuracies, num_heads, checkpoint.name)
    elif (stored := checkpoint.config.get(ACCURACIES)) is not None:
        try:
            accuracies = parse_accuracies(stored)
            _check_one_for_each(accuracies, num_heads, checkpoint.name)
        except ConfigError as error:
            raise CompatibilityError(f"in config.json of {checkpoint.name!r}, {error}") from error
    return TokenTree.by_worth(choices_from_accuracies(accuracies or VICUNA_7B[:num_heads], num_nodes))


def _check_one_for_each(accuracies: Accuracies, num_heads: int, name: str) -> None:
    if len(accuracies) != num_heads:
        raise ConfigError(
            f"medusa_head_accuracies has {len(accuracies)} lists, but {name!r} has {num_heads} Medusa heads: give one "
            f"list for each head"
        )


def _is_token_map(published: str) -> bool:
    return _without_prefix(published) == TOKEN_MAP


def _checkpoint(options: MedusaConfig) -> Checkpoint:
    return Checkpoint(str(options.model), options.revision, FILES)


def _is_vllms(checkpoint: Checkpoint) -> bool:
    return any(_without_prefix(name).startswith(("blocks.", "lm_heads.")) for name in checkpoint.shapes)


def _names(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of the checkpoint's tensors, by their names in `MedusaHeads`."""
    named = ((name_in_module(published), shape) for published, shape in checkpoint.shapes.items())
    return {name: shape for name, shape in named if name is not None}


def _num_heads(checkpoint: Checkpoint) -> int:
    """Count the heads by their tensors: config.json files in the authors' layout give other numbers."""
    numbers = [
        int(match[1]) for name in _names(checkpoint) if (match := re.match(r"(?:heads|lm_heads)\.(\d+)\.", name))
    ]
    if not numbers:
        raise CompatibilityError(
            f"{checkpoint.name!r} has no Medusa heads: its tensors are {shown(sorted(checkpoint.shapes))}. Name the "
            f"method that it is for"
        )
    num_heads = len(set(numbers))
    if max(numbers) >= num_heads:
        raise CompatibilityError(
            f"{checkpoint.name!r} has tensors of {num_heads} Medusa heads, and one of them has the number "
            f"{max(numbers)}: use a checkpoint whose heads are numbered from 0 on without gaps"
        )
    return num_heads


def _sizes(checkpoint: Checkpoint, target: TargetInfo) -> HeadSizes:
    found, num_heads = _names(checkpoint), _num_heads(checkpoint)
    with checkpoint.reading_config() as config:
        scale = config_value(config, "logit_scale", number(0, LARGEST_SCALE, low_open=True), 1.0)
        is_shared = config_value(config, "original_lm_head", flag, False)
    output_rows = [shape[0] for name, shape in found.items() if name.startswith("lm_heads.") and len(shape) == 2]
    num_layers = len({name for name in found if re.fullmatch(r"heads\.0\.\d+\.weight", name)})
    has_bias = any(re.fullmatch(r"heads\.\d+\.\d+\.bias", name) for name in found)
    if _is_vllms(checkpoint):
        _check_stated(checkpoint, target, num_heads, num_layers, has_bias=has_bias)
    is_shared |= any(name.endswith("lm_head.weight") for name in checkpoint.shapes)
    # Without output layers, heads in their authors' layout use the target's. vLLM's always have their own.
    has_outputs = bool(output_rows) or _is_vllms(checkpoint)
    num_mapped = _num_mapped(checkpoint.config, checkpoint.shapes, target.vocab_size)
    if num_mapped is not None and not has_outputs:
        raise CompatibilityError(
            f"the Medusa heads {checkpoint.name!r} have no LM heads of their own, and a vocabulary of {num_mapped} "
            f"tokens, which the target's LM head does not have: download or save them again"
        )
    if output_rows and output_rows[0] != num_mapped:
        with checkpoint.reading_config():
            check_target_sizes(target, {"the number of rows of its LM heads": (output_rows[0], target.vocab_size)})
    return HeadSizes(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        vocab_size=output_rows[0] if output_rows else target.vocab_size,
        num_outputs=(1 if is_shared else num_heads) if has_outputs else 0,
        has_bias=has_bias,
        num_mapped=num_mapped,
        logit_scale=float(scale),
    )


def _check_stated(
    checkpoint: Checkpoint, target: TargetInfo, num_heads: int, num_layers: int, *, has_bias: bool
) -> None:
    """Raise CompatibilityError if config.json contradicts the target or the tensors. Keys may be left out or null."""
    with checkpoint.reading_config() as config:
        check_target_sizes(
            target, {key: (config.get(key), getattr(target, key)) for key in ("hidden_size", "vocab_size")}
        )
    of_tensors = {"num_heads": num_heads, "num_hidden_layers": num_layers}
    if num_layers:
        of_tensors["medusa_fc_bias"] = has_bias
    for key, expected in of_tensors.items():
        stated = checkpoint.config.get(key)
        if stated is not None and (type(stated) is not type(expected) or stated != expected):
            raise CompatibilityError(
                f"{key} in config.json of {checkpoint.name!r} is {shown(stated)}, and its tensors are of {expected}: "
                f"download or save it again"
            )


def _num_mapped(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> int | None:
    """The number of tokens in the heads' vocabulary if it lacks some of the target's, else None."""
    table = next((shape for name, shape in shapes.items() if _is_token_map(name)), None)
    stated = config.get("truncated_vocab_size")
    if stated is None or stated == vocab_size:
        return None
    if table is None or len(table) != 1 or table[0] != stated:
        raise CompatibilityError(
            f"truncated_vocab_size in the Medusa heads' config.json is {shown(stated)}, and the checkpoint needs a "
            f"{TOKEN_MAP} of that length: it has {'none' if table is None else list(table)}"
        )
    return table[0]
