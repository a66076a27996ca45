"""Determines a model's structure, and the memory that its weights take, without loading the weights.

The model is created on torch's meta device.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec_core.config.draft_options import DraftModelConfig
from specdec_core.contracts.kv import KVLayout
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError, reason
from specdec_core.models.activations import activation_bytes
from specdec_core.models.attention import IMPLEMENTATION, probe
from specdec_core.models.compatibility import check_masks, refusing_failures
from specdec_core.models.load import ModelSource, load_config, no_attention
from specdec_core.models.mixers import adopt_mixers
from specdec_core.models.model import KVGroups, backbone_of, kv_groups_of, target_info_of
from specdec_core.models.quantization import loading_quantizer, own_quantization
from specdec_core.models.rope import pin_positions
from specdec_core.models.sizes import wrong_sizes
from specdec_core.models.stored_bytes import stored_bytes
from specdec_core.models.weight_bytes import quantize_empty, weight_bytes
from specdec_core.models.weight_only import refuse_unquantized, scheme_of


class NeedsWeightsError(CompatibilityError):
    """The model's forward pass reads values, so its structure is known only once its weights are loaded."""


@frozen
class Outline:
    """A model's structure, and the memory that its weights take.

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
    quantizer = loading_quantizer(source.quantization, config, source.device)
    empty = _empty_model(source, config, info.dtype)
    size = weight_bytes(empty)
    stored = stored_bytes(source.path, source.revision)
    may_be_smaller = False
    if own_quantization(config) is not None:
        size, may_be_smaller = (size, True) if stored is None else (stored, False)
    elif quantizer is not None:
        quantized = quantize_empty(_empty_model(source, config, info.dtype), quantizer, source.device)
        refuse_unquantized(source.quantization, quantized, source.path)
        size, may_be_smaller = weight_bytes(quantized), scheme_of(source.quantization) is None
    kv_groups, activations = _run(empty, info)
    return Outline(info, kv_groups, size, may_be_smaller, activations)


def outline_draft(config: DraftModelConfig, target: TargetInfo) -> Outline:
    """Make the `Outline` of a draft model, a causal LM that `BuildContext.load_model` would load with this config.
    Raises the same errors as `outline`."""
    return outline(ModelSource.of_draft(config, target))


def _empty_model(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config),
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=source.trust_remote_code,
                **({} if source.code_revision is None else {"code_revision": source.code_revision}),
            )
    except KeyError as error:
        raise no_attention(config, error) from error
    except Exception as error:  # senseless sizes may raise anything
        why = wrong_sizes(config.to_dict()) or f"{type(error).__name__}: {reason(error)}"
        raise ConfigError(f"a model cannot be made of the configuration of {config.name_or_path!r}: {why}") from error
    return model.eval()


def _run(empty: Any, info: TargetInfo) -> tuple[KVGroups, int | None]:
    """Run a model on the meta device. Returns its KV groups and the bytes of its activations per token (None: not
    known). Checks its attention masks: raises CompatibilityError if a check fails, NeedsWeightsError if the forward
    pass needs the values of tensors."""
    # Grouped matrix products of meta tensors exist only in bfloat16, and shapes do not depend on the dtype.
    empty.to(torch.bfloat16)
    with torch.no_grad(), refusing_failures(empty), _Guessing():  # type: ignore[no-untyped-call]
        try:
            pin_positions(empty, info.max_model_len)
            adopt_mixers(empty, empty.config.get_text_config())
            sites = probe(empty)
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


class _Guessing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that returns made-up values when a model's code reads values of meta tensors.

    Numbers are 0, and `nonzero` finds nothing. Booleans are True, so that transformers takes the tokens for one
    sequence and not for several packed ones.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_unknown = args and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_unknown and func is torch.ops.aten._local_scalar_dense.default:
            return torch.full((), args[0].dtype == torch.bool, dtype=args[0].dtype).item()
        if is_unknown and func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
