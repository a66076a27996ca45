"""Models on torch's meta device, where tensors have shapes but no values."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec_core.errors import ConfigError, reason
from specdec_core.models.attention import IMPLEMENTATION
from specdec_core.models.load import ModelSource, no_attention
from specdec_core.models.sizes import wrong_sizes


def empty_model(
    source: ModelSource,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = IMPLEMENTATION,
) -> Any:
    """Make a model on the meta device, in evaluation mode. Raises ConfigError or CompatibilityError if transformers
    cannot make one of this configuration.

    attn_implementation: the name of the attention function. None: transformers' default.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config),
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=source.trust_remote_code,
                **({} if source.code_revision is None else {"code_revision": source.code_revision}),
            )
    except KeyError as error:
        raise no_attention(config, error) from error
    except Exception as error:  # senseless sizes may raise anything
        why = wrong_sizes(config.to_dict()) or f"{type(error).__name__}: {reason(error)}"
        raise ConfigError(f"a model cannot be made of the configuration of {config.name_or_path!r}: {why}") from error
    return model.eval()


class GuessedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
