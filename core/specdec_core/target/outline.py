"""A model without its weights: what it is and what it needs, found out before anything is loaded."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec_core.config import DraftModelConfig
from specdec_core.errors import CompatibilityError, ConfigError
from specdec_core.target.attention import IMPLEMENTATION, probe
from specdec_core.target.load import load_config, no_attention, parse_dtype, resolve_model
from specdec_core.target.model import kv_layout_of, target_info_of
from specdec_core.target.positions import pin_positions
from specdec_core.target.quantization import quantized_loading
from specdec_core.target.trial import check_masks, refusing_failures
from specdec_core.target.weight_files import stored_bytes
from specdec_core.types import KVLayout, TargetInfo


@frozen
class Outline:
    """What `Target` would say of itself. weight_bytes: parameters and buffers, tied ones once; the few that a family
    keeps in float32 are counted in the model's type."""

    info: TargetInfo
    kv_layout: KVLayout
    weight_bytes: int


def outline(
    model: str | Path,
    *,
    device: torch.device,
    dtype: str | torch.dtype = "auto",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    code_revision: str | None = None,
    quantization: Any = None,
) -> Outline:
    """The outline of a checkpoint, from its configuration and the headers of its weight files.

    The model is made of torch's meta tensors, which have shapes and no values, and run. So whatever `Target` refuses
    for its structure is refused here, by the same code. What takes values is not found out: whether a tensor is
    missing, and what `try_out` compares. Raises ConfigError or CompatibilityError.
    """
    path = resolve_model(model)
    config = load_config(path, trust_remote_code=trust_remote_code, revision=revision, code_revision=code_revision)
    torch_dtype = parse_dtype(dtype, device)
    info = target_info_of(path, config, torch_dtype, device, max_model_len)
    quantized_loading(quantization, config, device)  # for its errors
    empty = _empty_model(config, torch_dtype, trust_remote_code=trust_remote_code, code_revision=code_revision)
    weight_bytes = sum({id(t): t.nbytes for t in (*empty.parameters(), *empty.buffers())}.values())
    stored = stored_bytes(path, revision)
    if getattr(config, "quantization_config", None) is not None and stored is not None:
        weight_bytes = stored
    return Outline(info, _kv_layout(empty, info), weight_bytes)


def outline_draft(config: DraftModelConfig, target: TargetInfo) -> Outline:
    """The outline of a draft model that is a causal LM, as `BuildContext.load_model` loads it. It raises what `outline`
    does."""
    return outline(
        config.model,
        device=target.device,
        dtype=target.dtype,
        trust_remote_code=target.trust_remote_code,
        revision=config.revision,
        code_revision=config.code_revision,
        quantization=config.quantization,
    )


def _empty_model(config: PretrainedConfig, dtype: torch.dtype, **kwargs: Any) -> Any:
    given = {key: value for key, value in kwargs.items() if value is not None}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config), dtype=dtype, attn_implementation=IMPLEMENTATION, **given
            )
    except KeyError as error:
        raise no_attention(config, error) from error
    except Exception as error:  # whatever sizes that make no sense make transformers raise
        raise ConfigError(
            f"a model cannot be made of the configuration of {config.name_or_path!r}: {type(error).__name__}: {error}"
        ) from error
    return model.eval()


def _kv_layout(empty: Any, info: TargetInfo) -> KVLayout:
    """What `Target` finds by running the model, after those of its checks that need no values."""
    # Grouped matrix products of meta tensors exist in bfloat16 alone, and shapes do not depend on the type.
    empty.to(torch.bfloat16)
    with torch.no_grad(), refusing_failures(empty), _Guessing():  # type: ignore[no-untyped-call]
        try:
            pin_positions(empty, info.max_model_len)
            layout = kv_layout_of(probe(empty).shapes, info.num_layers, info.dtype)
        except Exception as error:
            if not _takes_values(error):
                raise
            raise CompatibilityError(
                f"what {type(empty).__name__} needs cannot be told without its weights, since its forward pass looks "
                f"at values ({error}). It may run nevertheless: load it"
            ) from error
        try:
            check_masks(empty, info.max_model_len)
        except Exception as error:
            if not _takes_values(error):
                raise
    return layout


def _takes_values(error: Exception) -> bool:
    """Whether torch raised it for want of values. It has no class of its own for that."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error)


class _Guessing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meta tensors have no values. Code that asks for a number, as routers of experts do, is told 0; code that asks
    whether something is so, True: masks are made for one sequence then, not for several that are packed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_unknown = args and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if is_unknown and func is torch.ops.aten._local_scalar_dense.default:
            return torch.full((), args[0].dtype == torch.bool, dtype=args[0].dtype).item()
        if is_unknown and func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
