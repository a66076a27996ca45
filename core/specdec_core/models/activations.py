"""How many bytes a model's forward pass has at once, beside weights and KV cache: found on the meta device, where
tensors have sizes but no memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec_core.models.attention import ProbeSite, attention_sites

NUM_TOKENS = 64
"""Of the forward pass that is run: what it has at once grows with the number of tokens."""


class CountingBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made in this context and still alive, and the most that there were at
    once (`most_bytes`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = 0
        self.most_bytes: int = 0
        self._views: Counter[int] = Counter()  # tensors of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._count(each, given)
        return result

    def _count(self, tensor: torch.Tensor, given: set[int]) -> None:
        key, num_bytes = _storage(tensor), tensor.untyped_storage().nbytes()
        if key in given and key not in self._views:
            return  # the caller's, made before
        if not self._views[key]:
            self._live_bytes += num_bytes
            self.most_bytes = max(self.most_bytes, self._live_bytes)
        self._views[key] += 1
        weakref.finalize(tensor, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._views[key] -= 1
        if not self._views[key]:
            del self._views[key]
            self._live_bytes -= num_bytes


def activation_bytes(backbone: nn.Module, sited: Sequence[nn.Module]) -> int:
    """Return the bytes per token that a forward pass of `backbone` (the model without its LM head) has at once, beside
    what attention itself takes. The model may be on the meta device. sited: its attention modules and recurrent
    layers."""
    positions = torch.arange(NUM_TOKENS, device=next(backbone.parameters()).device).unsqueeze(0)
    counting = CountingBytes()
    with attention_sites(sited, ProbeSite()), counting:
        backbone(torch.zeros_like(positions), position_ids=positions, use_cache=False)
    return -(-counting.most_bytes // NUM_TOKENS)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
