"""How a plugin offers faster versions of the operations in `specdec_core.ops`, and for which layers of a model."""

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
    once for a draft model's or head's own layers.

    kv_layout: shapes of these layers' KV cache; the target's shapes for draft layers without a KV cache.
    features: the optional arguments of `paged_attention` that the layers use, among "window", "softcap" and "sinks";
        empty for other operations. Layers of one model may differ in them (Gemma, gpt-oss).
    """

    device: torch.device
    dtype: torch.dtype  # of hidden states, queries and weights, except modules that a family keeps in float32
    kv_layout: KVLayout
    features: frozenset[str] = frozenset()


@frozen(eq=False)
class OpsSpec:
    """Operations (kernels) for one type of device, returned by the hook `specdec_ops`.

    api: the version of the plugin API that the plugin is written for (PLUGIN_API).
    ops: maps an operation's name to a function. Names, signatures and results are as in `specdec_core.ops.REFERENCE`.
    supports: called with an operation's name and an OpsContext, returns whether the function works for these layers; if
        not, another is used. Called only while an engine is built; for `paged_attention` with each set of features that
        the layers use. The function itself must handle all that differs between calls: the number of tokens, tree
        attention (`AttentionPlan.ancestors`), modules of another dtype. `pack_linear` gets no quantized layers.
    """

    api: int
    ops: Mapping[str, Callable[..., Any]]
    supports: Callable[[str, OpsContext], bool] = lambda name, context: True
