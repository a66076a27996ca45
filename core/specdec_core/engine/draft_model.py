"""Draft models that are causal LMs themselves, loaded as the target is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec_core.config import DraftModelConfig
from specdec_core.errors import PluginError
from specdec_core.target import Target
from specdec_core.target.attention import PagedAttention
from specdec_core.types import TargetInfo


def load_draft_model(
    config: DraftModelConfig,
    *,
    target: TargetInfo,
    attention: PagedAttention | None,
    ops: Mapping[str, Callable[..., Any]],
) -> Target:
    """A causal LM in the target's type and on its device, with its keys and values in the draft's group of the cache.

    Raises what loading a target raises; PluginError if the plan has asked for no group.
    """
    if attention is None:
        raise PluginError("a draft model needs a group in the KV cache: its plan must have a kv_layout")
    model = Target(
        config.model,
        device=target.device,
        dtype=target.dtype,
        trust_remote_code=target.trust_remote_code,
        revision=config.revision,
        code_revision=config.code_revision,
        quantization=config.quantization,
    )
    model.attach(attention, ops)
    return model
