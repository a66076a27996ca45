"""Torch reference operations. Each has the signature of the kernel that may replace it (hook `specdec_ops`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec_core.errors import PluginError
from specdec_core.ops.attention import paged_attention, store_kv
from specdec_core.ops.linear import pack_linear
from specdec_core.ops.norm import rms_norm
from specdec_core.ops.rotary import rotary

REFERENCE: Mapping[str, Callable[..., Any]] = {
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "pack_linear": pack_linear,
}


def resolve(replacements: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The reference operations, with those that a plugin offers in their place. Raises PluginError on a name that
    replaces nothing."""
    unknown = sorted(set(replacements) - set(REFERENCE))
    if unknown:
        raise PluginError(f"specdec_ops offers {unknown}, which replace nothing: core has {sorted(REFERENCE)}")
    return {**REFERENCE, **replacements}
