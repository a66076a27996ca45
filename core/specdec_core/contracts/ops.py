"""The contract of operations: how a plugin offers faster versions of those in `specdec_core.ops`, for which layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec_core.contracts.kv import KVLayout

if TYPE_CHECKING:
    import torch


@frozen
class OpsContext:
    """Describes the layers for which operations are chosen when an engine is built: once for the target's layers, and
    once for those of a draft that has its own.

    kv_layout: of these layers' KV cache; the target's for a draft whose layers have no KV cache.
    features: the optional arguments of `paged_attention` that the layers use, among "window", "softcap" and "sinks";
        empty for other operations. Layers of one model may differ in them (Gemma, gpt-oss).
    """

    device: torch.device
    dtype: torch.dtype  # of hidden states, queries and weights, except modules that a family keeps in float32
    kv_layout: KVLayout
    features: frozenset[str] = frozenset()


def supports_everything(name: str, context: OpsContext) -> bool:
    """The default of `OpsSpec.supports`: True for every operation and all layers."""
    return True


@frozen(eq=False)
class OpsSpec:
    """Operations (kernels) for one type of device, returned by the hook `specdec_ops`.

    api: the plugin API that the plugin is written for: see PLUGIN_API.
    ops: {name: function} with names and signatures of `specdec_core.ops.REFERENCE`, and the same results.
    supports: (name, context) -> whether the function of that name can compute these layers. If not, another plugin's
        function or core's is used. Called only while an engine is built; for `paged_attention` with each combination of
        features that the layers use. The function itself must handle what differs between calls: the number of tokens,
        tree attention (`AttentionPlan.ancestors`), modules of another dtype. `pack_linear` gets no quantized layers.
    """

    api: int
    ops: Mapping[str, Callable[..., Any]]
    supports: Callable[[str, OpsContext], bool] = supports_everything
