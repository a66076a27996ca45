"""Determines a model's structure, and the memory that its weights take, without loading the weights.

The model is created on torch's meta device.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from attrs import frozen

from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.contracts.kv import KVLayout
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError
from specdec_core.models.activations import activation_bytes
from specdec_core.models.attention import probe
from specdec_core.models.compatibility import check_masks
from specdec_core.models.empty_model import empty_model
from specdec_core.models.graph_memory import ACTIVATIONS, graph_bytes
from specdec_core.models.load import ModelSource, load_config
from specdec_core.models.mixers import adopt_mixers
from specdec_core.models.model import KVGroups, backbone_of, kv_groups_of, target_info_of
from specdec_core.models.quantization import loading_quantizer, own_quantization
from specdec_core.models.rope import pin_positions
from specdec_core.models.split import Split, connect, shrink
from specdec_core.models.split_load import looking_at, plan_split
from specdec_core.models.split_modules import Part
from specdec_core.models.stored_bytes import stored_bytes
from specdec_core.models.weight_bytes import quantize_empty, weight_bytes
from specdec_core.models.weight_only import refuse_unquantized, scheme_of


class NeedsWeightsError(CompatibilityError):
    """The model's forward pass reads values, so its structure is known only once its weights are loaded."""


@frozen
class Outline:
    """A model's structure, and the memory that its weights take.

    All numbers are of one rank, where the model is split among several (tensor_parallel_size).

    weight_bytes: bytes of parameters and buffers; a tensor that modules share (tied weights) is counted once. The few
        parameters that a family keeps in float32 are counted in the model's dtype. Weights that torchao quantizes while
        they are loaded have their quantized size; those of other methods are counted as they are before. For a
        quantized checkpoint, this is the size of its files, if they are on this machine.
    may_be_smaller: the weights may take fewer bytes than that, since they are quantized in a way that is not followed.
    activation_bytes: of a forward pass without the LM head, per token; None: not known.
    """

    info: TargetInfo
    kv_groups: KVGroups
    weight_bytes: int
    may_be_smaller: bool = False
    activation_bytes: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """`activation_bytes`, or an estimate if they are not known."""
        return self.activation_bytes or self.info.hidden_size * self.info.dtype.itemsize * ACTIVATIONS

    @property
    def graph_bytes(self) -> int:
        """Of the CUDA graphs of its forward passes, if it has any, without taps and what attention takes."""
        return graph_bytes(self.info.vocab_size * self.info.dtype.itemsize, self.bytes_per_token)

    @property
    def kv_layout(self) -> KVLayout:
        """The KV cache layout of a draft model's layers. Raises CompatibilityError if the layers have different
        layouts, since a proposer's `Plan` has only one."""
        return self.kv_groups.only


def outline(source: ModelSource) -> Outline:
    """Make the `Outline` of a checkpoint's model without loading the weights.

    The model is run with meta tensors, which have shapes but no values. Missing tensors are not detected, and logits
    are not compared as in `compatibility.try_out`.

    Raises ConfigError or CompatibilityError if the model cannot be loaded or is not supported, and NeedsWeightsError if
    that is known only once its weights are loaded.
    """
    config = load_config(source)
    info = target_info_of(source, config)
    part = Part.pretended(source.tensor_parallel_size)
    split = plan_split(source, config, info, part) if part.size > 1 else None
    quantizer = loading_quantizer(source.quantization, config, source.device)
    empty = empty_model(source, config, info.dtype)
    if split is not None:
        shrink(empty, split)
    size = weight_bytes(empty)
    if split is not None:
        connect(empty, split, part)
    is_quantized = own_quantization(config) is not None
    stored = stored_bytes(source.path, source.revision, is_quantized=is_quantized)
    may_be_smaller = False
    if is_quantized:
        size, may_be_smaller = (size, True) if stored is None else (stored, False)
    elif quantizer is not None:
        quantized = quantize_empty(empty_model(source, config, info.dtype), quantizer, source.device)
        refuse_unquantized(source.quantization, quantized, source.path)
        size, may_be_smaller = weight_bytes(quantized), scheme_of(source.quantization) is None
    kv_groups, activations = _run(empty, info, split)
    return Outline(info, kv_groups, size, may_be_smaller, activations)


def outline_draft(config: DraftModelConfig, target: TargetInfo) -> Outline:
    """Make the `Outline` of a draft model, a causal LM that `BuildContext.load_model` would load with this config.
    Raises the same errors as `outline`."""
    return outline(ModelSource.of_draft(config, target))


def _run(empty: Any, info: TargetInfo, split: Split | None) -> tuple[KVGroups, int | None]:
    """Run a model on the meta device. Returns its KV groups and the bytes of its activations per token (None: not
    known). Checks its attention masks: raises CompatibilityError if a check fails, NeedsWeightsError if the forward
    pass needs the values of tensors."""
    with looking_at(empty):
        try:
            pin_positions(empty, info.max_model_len)
            adopt_mixers(empty, empty.config.get_text_config())
            sites = probe(empty)
            if split is not None:
                split.check(sites.shapes)
            groups = kv_groups_of(sites, info.num_layers, info.dtype)
        except Exception as error:
            if not _takes_values(error):
                raise
            raise NeedsWeightsError(
                f"the KV cache of {type(empty).__name__} cannot be planned without its weights: its forward pass reads "
                f"values ({error}). It may run nevertheless: load it"
            ) from error
        try:
            check_masks(empty, info.max_model_len)
        except Exception as error:
            if not _takes_values(error):
                raise
        activations = None
        with suppress(Exception):  # of a backbone that does not run alone
            found = activation_bytes(backbone_of(empty, sites.layers), sites.layers)
            activations = found * info.dtype.itemsize // torch.bfloat16.itemsize
    return groups, activations


def _takes_values(error: Exception) -> bool:
    """Whether torch raised this error because meta tensors have no values."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error)
