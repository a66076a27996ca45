"""Calls of the modules that keep a state for each request, in models with recurrent layers.

Such a module is called a mixer here. Its computations are transformers' own: it reads and writes states through the
methods of transformers' cache, which `StateCache` and `StateProbe` have. What states a forward pass gives it is decided
by a *site*, an attribute of the module, as for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn

from specdec_core.contracts.kv import StateTensor
from specdec_core.errors import CompatibilityError
from specdec_core.models.families import RECURRENT

SITE = "specdec_site"
"""The attribute of an attention module or mixer with its site."""

NUM_CHECKED = 4
"""Tokens that a check computes at once and one after the other."""
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.05
"""Relative to the largest number; the second where anything is in less than float32."""

Run = Callable[[torch.Tensor, Any], torch.Tensor]
"""A mixer's own forward pass: hidden states [n, num_tokens, width] and a cache (None: no states) to an output of the
same shape."""


@frozen(eq=False)
class CachedStates:
    """The states of a mixer, as the attributes of a layer of transformers' cache. Mixers of transformers 5.17 read
    these, and call the `get_` methods of the cache in later versions."""

    conv_states: tuple[torch.Tensor | None]
    recurrent_states: tuple[torch.Tensor | None]
    record_past: bool = False


@frozen(eq=False)
class StateCache:
    """The states of a batch in one layer, in place of transformers' cache. A mixer replaces or overwrites them.

    tensors: the states by name, [n, ...] each.
    layer_idx: of the mixer.
    """

    tensors: MutableMapping[str, torch.Tensor]
    layer_idx: int

    @property
    def layers(self) -> Mapping[int, CachedStates]:
        states = CachedStates((self.tensors.get("conv"),), (self.tensors.get("recurrent"),))
        return {self.layer_idx: states}

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.tensors.get("conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.tensors.get("recurrent")

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **more: Any) -> torch.Tensor:
        """Append a convolution's new inputs [n, channels, num_tokens]. Returns them behind those of the state."""
        before = self.tensors["conv"]
        known = torch.cat([before, conv_states], dim=-1)
        self.tensors["conv"] = known[..., -before.shape[-1] :]
        return known

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **more: Any) -> torch.Tensor:
        self.tensors["recurrent"] = recurrent_states
        return recurrent_states


@define(eq=False)
class StateProbe:
    """Records the shapes of a mixer's states, in place of transformers' cache. There are no states before the first
    token."""

    found: list[StateTensor] = field(factory=list)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        self._check(state_idx)
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._check(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._check(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        self._check(state_idx)
        self.found.append(StateTensor("conv", (conv_states.shape[1], conv_kernel_size), conv_states.dtype))
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self._check(state_idx)
        self.found.append(StateTensor("recurrent", tuple(recurrent_states.shape[1:]), recurrent_states.dtype))
        return recurrent_states

    def _check(self, state_idx: int) -> None:
        if state_idx:
            raise CompatibilityError(
                f"a recurrent layer has a state number {state_idx}: one convolution and one recurrent state per layer "
                f"are supported. Use a model of another family"
            )


class TokenByToken:
    """The site of mixers in a trial forward pass: no token's output depends on another token."""

    def mix(self, module: nn.Module, hidden: torch.Tensor, run: Run) -> torch.Tensor:
        return run(hidden.transpose(0, 1), None).transpose(0, 1)


class CheckedTokenByToken(TokenByToken):
    """Also checks that a mixer computes the same for several tokens at once and one after the other: prompts are
    computed in the first way, and output tokens in the second."""

    def mix(self, module: nn.Module, hidden: torch.Tensor, run: Run) -> torch.Tensor:
        if not hidden.is_meta:
            self._check(module, hidden[:, :NUM_CHECKED], run)
        return super().mix(module, hidden, run)

    def _check(self, module: nn.Module, hidden: torch.Tensor, run: Run) -> None:
        probed = StateProbe()
        run(hidden, probed)
        at_once, in_turn = ({each.name: _zeros(each, hidden.device) for each in probed.found} for _ in range(2))
        layer_idx: Any = module.layer_idx
        expected = [run(hidden, StateCache(at_once, layer_idx))]
        one_by_one = (run(token, StateCache(in_turn, layer_idx)) for token in torch.split(hidden, 1, dim=1))
        found = [torch.cat([*one_by_one], dim=1)]
        is_rounded = hidden.dtype != torch.float32
        for name in at_once:
            expected.append(at_once[name])
            found.append(in_turn[name])
        for one, other in zip(expected, found, strict=True):
            difference = (one.float() - other.float()).abs().max()
            most = (ROUNDED_TOLERANCE if is_rounded else TOLERANCE) * one.float().abs().max()
            if not difference <= most:  # NaN, too
                raise CompatibilityError(
                    f"{type(module).__name__} computes several tokens otherwise than one after the other (the two "
                    f"differ by {difference:.2g} in a trial), so its output would depend on how prompts are divided: "
                    f"models with this configuration are not supported"
                )


def _zeros(state: StateTensor, device: torch.device) -> torch.Tensor:
    """The state before a request's first token."""
    return torch.zeros(1, *state.shape, dtype=state.dtype, device=device)


def adopt_mixers(model: nn.Module, text_config: Any) -> None:
    """Make the mixers of a model from transformers call the method `mix` of their sites. Does nothing if the model's
    family has none."""
    family = RECURRENT.get(text_config.model_type)
    if family is None:
        return
    for layer in list(model.modules()):
        mixer = getattr(layer, family.mixer, None)
        if isinstance(mixer, nn.Module) and hasattr(mixer, "layer_idx"):
            run = partial(_run, mixer, family.cache)
            mixer.forward = partial(_mix, mixer, run)


def _run(mixer: nn.Module, cache: str, hidden: torch.Tensor, states: Any) -> torch.Tensor:
    output: torch.Tensor = type(mixer).forward(mixer, hidden, **{cache: states})
    return output


def _mix(mixer: nn.Module, run: Run, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
    """What a decoder layer calls. Arguments about the whole batch say nothing about its requests."""
    site = getattr(mixer, SITE, None)
    if site is None:
        raise CompatibilityError(
            f"{type(mixer).__name__} was not prepared for states of requests: load the model through specdec's Target"
        )
    mixed: torch.Tensor = site.mix(mixer, hidden_states, run)
    return mixed
