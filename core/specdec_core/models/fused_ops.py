"""Replaces norms and rotary embeddings of a transformers model by plugins' operations that compute the same.

Whether a norm or rotary embedding can be replaced does not depend on the family's name. It is replaced if, on a trial
input, it gives the same bits as the operation's reference implementation in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from specdec_core.models.families import APPLY_ROTARY
from specdec_core.ops import REFERENCE

Operation = Callable[..., Any]


def replace_parts(model: nn.Module, ops: Mapping[str, Operation]) -> None:
    """Make a model call `ops["rms_norm"]` in its RMSNorm modules and `ops["rotary"]` where its attention modules apply
    rotary embeddings, wherever the model's own code gives the same bits as the reference implementation. An operation
    that is itself the reference implementation is left out."""
    like = next(model.parameters(), torch.empty(0))
    for module in list(model.modules()):
        if ops["rotary"] is not REFERENCE["rotary"]:
            _replace_rotary(module, ops["rotary"], like)
        if ops["rms_norm"] is not REFERENCE["rms_norm"]:
            for name, child in module.named_children():
                if _is_rms_norm(child):
                    setattr(module, name, RMSNorm(child, ops["rms_norm"]))


class RMSNorm(nn.Module):
    """A norm module that calls the operation `rms_norm` with the weight and epsilon of the module that it replaces."""

    def __init__(self, original: nn.Module, operation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = original.weight, _eps(original)
        self._operation = operation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._operation(hidden_states, self.weight, self.variance_epsilon)


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module gives the same bits as the reference implementation of `rms_norm` on a trial input. False
    for LayerNorm, for families that store the weight minus 1, and for modules that round intermediate results
    differently or take more inputs."""
    if not isinstance(_eps(module), float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.dim() != 1 or len(signature(module.forward).parameters) != 1:
        return False
    trial = torch.linspace(-3, 5, weight.numel(), device=weight.device).to(weight.dtype).unsqueeze(0)
    return _agree(lambda: module(trial), lambda: REFERENCE["rms_norm"](trial, weight, _eps(module)))


def _replace_rotary(module: nn.Module, operation: Operation, like: torch.Tensor) -> None:
    """Make an attention module use the operation `rotary`, if the family's function `apply_rotary_pos_emb` computes
    the same as the reference implementation of `rotary`.

    The module gets a copy of its `forward` method, in which the name `apply_rotary_pos_emb` refers to the operation.

    like: a tensor with the dtype and device on which the two functions are compared.
    """
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return
    original = forward.__globals__.get(APPLY_ROTARY) if APPLY_ROTARY in forward.__code__.co_names else None
    if original is None or not _is_rotary(original, like):
        return

    def rotary(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        # The original handles cases that the trial did not cover: partly rotated heads, other layouts and dtypes.
        widths, dtypes = {each.shape[-1] for each in (q, k, cos)}, {each.dtype for each in (q, k, cos)}
        is_as_tried = not args and not kwargs and cos.dim() == 3 and len(widths) == len(dtypes) == 1
        return (operation if is_as_tried else original)(q, k, cos, sin, *args, **kwargs)

    named = forward.__globals__ | {APPLY_ROTARY: rotary}
    own = FunctionType(forward.__code__, named, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


def _is_rotary(function: Operation, like: torch.Tensor) -> bool:
    numbers = torch.linspace(-3, 5, 2 * 3 * 8, device=like.device).to(like.dtype)
    heads, angles = numbers.view(1, 2, 3, 8), numbers[:24].view(1, 3, 8)
    trial = heads, heads.flip(1), angles, angles.flip(2)
    return _agree(lambda: function(*trial), lambda: REFERENCE["rotary"](*trial))


def _agree(part: Operation, reference: Operation) -> bool:
    try:
        found, expected = part(), reference()
    except Exception:  # a module of the same name with other inputs
        return False
    pairs = zip(found, expected, strict=True)
    return len(found) == len(expected) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
