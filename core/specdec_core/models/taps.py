"""Where features are taken: what enters a decoder layer, or leaves the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from specdec_core.errors import ConfigError


def register_tap(layers: nn.ModuleList, tap: str, keep: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have `keep` called in each pass with what `tap` names: "input.i", the hidden states [..., width] that enter
    layer i, or with i the number of layers, those that the last one leaves. Raises ConfigError if it is not one."""
    kind, _, index = tap.partition(".")
    if kind != "input" or not index.isdigit() or int(index) > len(layers):
        raise ConfigError(f"tap {tap!r} is not known: give 'final' or 'input.i' with i from 0 to {len(layers)}")
    if int(index) == len(layers):
        return layers[-1].register_forward_hook(
            lambda module, args, out: keep(out[0] if isinstance(out, tuple) else out)
        )

    def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    return layers[int(index)].register_forward_pre_hook(pre_hook, with_kwargs=True)
