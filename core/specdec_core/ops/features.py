"""Attention by several functions, where none has all of windows, soft caps and sinks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, product
from typing import Any

import torch

from specdec_core.ops.attention_plan import AttentionPlan

FEATURES = ("window", "softcap", "sinks")


def by_features(choose: Callable[[frozenset[str]], Callable[..., Any]]) -> Callable[..., Any]:
    """choose: features that a layer gives to `paged_attention` -> the function for it. Returns that function where it
    is the same one for all of them, else one that looks up which."""
    table = {
        given: choose(frozenset(compress(FEATURES, given))) for given in product((False, True), repeat=len(FEATURES))
    }
    plain = table[False, False, False]
    if all(function is plain for function in table.values()):
        return plain

    def paged_attention(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Any:
        function = table[window is not None, softcap is not None, sinks is not None]
        return function(query, keys, values, plan, scaling, window=window, softcap=softcap, sinks=sinks)

    return paged_attention
