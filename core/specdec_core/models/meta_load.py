"""Loads a model on the meta device: its structure and its memory, without weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec_core.config.speculative import DraftModelConfig
from specdec_core.contracts.kv import KVLayout
from specdec_core.contracts.target import TargetInfo
from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.models.attention import IMPLEMENTATION, probe
from specdec_core.models.checkpoint import stored_bytes
from specdec_core.models.compatibility import check_masks, refusing_failures
from specdec_core.models.load import ModelSource, load_config, no_attention
from specdec_core.models.model import KVGroups, kv_groups_of, target_info_of
from specdec_core.models.quantization import own_quantization, quantized_loading
from specdec_core.models.rope import pin_positions


@frozen
class Outline:
    """A model's structure. weight_bytes: of parameters and buffers, tied ones once; the few parameters that a family
    keeps in float32 are counted in the model's dtype."""

    info: TargetInfo
    kv_groups: KVGroups
    weight_bytes: int

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of all layers of a draft model. Raises CompatibilityError if they differ, since a draft's plan has
        one layout."""
        return self.kv_groups.only


def outline(source: ModelSource) -> Outline:
    """The outline of a checkpoint, from its configuration and the headers of its weight files.

    Runs the model with meta tensors, which have shapes but no values. So it refuses unsupported structures by the same
    code as `Model`. It does not detect missing tensors, nor what `try_out` compares. Raises ConfigError or
    CompatibilityError.
    """
    config = load_config(source)
    info = target_info_of(source, config)
    quantized_loading(source.quantization, config, source.device)  # for its errors
    empty = _empty_model(source, config, info.dtype)
    weight_bytes = sum({id(t): t.nbytes for t in (*empty.parameters(), *empty.buffers())}.values())
    stored = stored_bytes(source.path, source.revision)
    if own_quantization(config) is not None and stored is not None:
        weight_bytes = stored
    return Outline(info, _kv_groups(empty, info), weight_bytes)


def outline_draft(config: DraftModelConfig, target: TargetInfo) -> Outline:
    """The outline of a draft model that is a causal LM, as `BuildContext.load_model` loads it. Raises the same errors
    as `outline`."""
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
        raise ConfigError(
            f"a model cannot be made of the configuration of {config.name_or_path!r}: {type(error).__name__}: {error}"
        ) from error
    return model.eval()


def _kv_groups(empty: Any, info: TargetInfo) -> KVGroups:
    """The KV groups of a model on the meta device, after the checks of `Model` that need no values."""
    # Grouped matrix products of meta tensors exist only in bfloat16, and shapes do not depend on the dtype.
    empty.to(torch.bfloat16)
    with torch.no_grad(), refusing_failures(empty), _Guessing():  # type: ignore[no-untyped-call]
        try:
            pin_positions(empty, info.max_model_len)
            groups = kv_groups_of(probe(empty).shapes, info.num_layers, info.dtype)
        except Exception as error:
            if not _takes_values(error):
                raise
            raise CompatibilityError(
                f"the KV cache of {type(empty).__name__} cannot be planned without its weights: its forward pass reads "
                f"values ({error}). It may run nevertheless: load it"
            ) from error
        try:
            check_masks(empty, info.max_model_len)
        except Exception as error:
            if not _takes_values(error):
                raise
    return groups


def _takes_values(error: Exception) -> bool:
    """Whether torch raised an error because meta tensors have no values; it has no exception type for that."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error)


class _Guessing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers code that reads values of meta tensors: 0 for numbers, as routers of experts read them, and True for
    booleans, so that masks are made for one sequence and not for several packed ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_unknown = args and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_unknown and func is torch.ops.aten._local_scalar_dense.default:
            return torch.full((), args[0].dtype == torch.bool, dtype=args[0].dtype).item()
        if is_unknown and func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
