"""Reference operations in torch. A plugin may replace each by a faster one with the same signature (hook
`specdec_ops`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress, product
from typing import Any

from attrs import evolve

from specdec_core.contracts.ops import OpsContext
from specdec_core.ops.argmax import likeliest
from specdec_core.ops.attention import paged_attention, store_kv
from specdec_core.ops.compaction import compact
from specdec_core.ops.decoder import fuse_layers
from specdec_core.ops.drawing import draw
from specdec_core.ops.elementwise import rms_norm, rotary
from specdec_core.ops.linear import pack_linear
from specdec_core.ops.penalties import penalize
from specdec_core.ops.residuals import Residuals
from specdec_core.ops.top_tokens import most_likely
from specdec_core.ops.truncation import truncate
from specdec_core.plugins.operations import OfferedOps

FEATURES = ("window", "softcap", "sinks")

REFERENCE: Mapping[str, Callable[..., Any]] = {
    "paged_attention": paged_attention,
    "store_kv": store_kv,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "pack_linear": pack_linear,
    "fuse_layers": fuse_layers,
    "draw": draw,
    "likeliest": likeliest,
    "truncate": truncate,
    "compact": compact,
    "penalize": penalize,
    "most_likely": most_likely,
    "residuals": Residuals,
}
OUTSIDE_OF_LAYERS = ("draw", "likeliest", "truncate", "compact", "penalize", "most_likely", "residuals")


def resolve(offered: OfferedOps, contexts: Sequence[OpsContext]) -> dict[str, Callable[..., Any]]:
    """Choose the operations for a model: a plugin's function where one supports the model's layers, else core's
    reference in torch.

    offered: the operations that the loaded plugins offer.
    contexts: one for each group of the model's layers. A chosen operation supports all of them.

    Returns the function for each operation's name. Raises PluginError if a plugin offers an operation that core does
    not have, or if two offer the same one for these layers.
    """
    offered.check_names(REFERENCE)

    def choose(name: str, given: Sequence[bool] = ()) -> Callable[..., Any]:
        features = frozenset(compress(FEATURES, given))
        found = {offered.choose(name, evolve(context, features=features)) for context in contexts}
        replacement = found.pop() if len(found) == 1 else None
        return REFERENCE[name] if replacement is None else replacement

    chosen = {name: choose(name) for name in REFERENCE}
    attentions = {given: choose("paged_attention", given) for given in product((False, True), repeat=len(FEATURES))}
    if len({*attentions.values()}) > 1:

        def by_features(query: Any, keys: Any, values: Any, plan: Any, scaling: float, **given: Any) -> Any:
            attention = attentions[tuple(given.get(feature) is not None for feature in FEATURES)]
            return attention(query, keys, values, plan, scaling, **given)

        chosen["paged_attention"] = by_features
    of_layers = [name for name in chosen if name not in OUTSIDE_OF_LAYERS]
    if not any(all(offer.spec.ops.get(name) is chosen[name] for name in of_layers) for offer in offered.offers):
        chosen["fuse_layers"] = fuse_layers  # another plugin's would not call the operations that are used
    return chosen
