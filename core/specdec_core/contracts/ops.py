"""The contract of operations: how a plugin offers faster ones than `specdec_core.ops` has, and for which layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core.contracts.kv import KVLayout

if TYPE_CHECKING:
    import torch


@frozen
class OpsContext:
    """What the engine knows of a model's layers when it is built and chooses who computes them.

    There is one for the target and one for a draft with layers of its own. kv_layout: of those layers' group in the KV
    cache, with num_kv_heads, key_dim, value_dim and the dtype of what is cached; for modules of a draft that has no
    group it is the target's. features: what `paged_attention` is given besides, a set of "window", "softcap" and
    "sinks"; empty for the other operations. A model may have layers with different ones (Gemma, gpt-oss).
    """

    device: torch.device
    dtype: torch.dtype  # of hidden states, queries and weights, but for modules that a family keeps in float32
    kv_layout: KVLayout
    features: frozenset[str] = frozenset()


def supports_everything(name: str, context: OpsContext) -> bool:
    """Of operations that do not say otherwise."""
    return True


@frozen(eq=False)
class OpsSpec:
    """Operations as data: returned by the hook `specdec_ops`, for one type of device.

    api: the plugin API that the plugin is written for: see PLUGIN_API.
    ops: {name: function} with names and signatures of `specdec_core.ops.REFERENCE`, and the same results.
    supports: (name, context) -> whether the function of that name may compute these layers. Where it may not, another
    plugin's or the reference does. It is asked while an engine is built and never again, and for `paged_attention` with
    every combination of features. What differs from call to call is the function's own business: how many tokens there
    are, whether any has a tree (`AttentionPlan.ancestors`), and modules in another type than the model's. Layers that
    are quantized are given to no operation.
    """

    api: int
    ops: Mapping[str, Callable[..., Any]]
    supports: Callable[[str, OpsContext], bool] = supports_everything
