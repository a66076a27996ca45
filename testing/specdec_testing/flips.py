"""Breaks one thing of a learned head at a time, and measures what that costs in acceptance.

A head that reads the hidden states of the wrong token, of the wrong layer or through the wrong mask still drafts, and
the output is still the target's. Only its acceptance is lower than it could be. So flip each of these on purpose:
if acceptance does not fall, the head never depended on what was flipped, and is probably wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec_core.api.llm import LLM
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.contracts.proposer import (
    BuildContext,
    Observation,
    Plan,
    Proposer,
    ProposerBatch,
    ProposerSpec,
    RequestView,
)
from specdec_core.engine.metrics import DraftCounts
from specdec_core.plugins import Plugins

Observe = Callable[[Observation], Observation]


@attrs.frozen
class Flip:
    """One deliberate mistake. What is left out stays as it is.

    built: breaks something of the built proposer in place, and returns a function that undoes that.
    observed: returns what the proposer observes in place of an observation.
    seen: returns the attention mask and the window in place of those of a forward pass of the head's layers.
    more_taps: hidden states that `observed` needs besides those in the proposer's Plan.
    """

    built: Callable[[Proposer], Callable[[], None]] | None = None
    observed: Observe | None = None
    seen: Callable[[Visibility, int | None], tuple[Visibility, int | None]] | None = None
    more_taps: tuple[str, ...] = ()


@attrs.frozen
class Effect:
    """The acceptance length of a head, and that with a flip."""

    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name}: acceptance length {self.before:.2f} -> {self.after:.2f}"


def effects(
    target: str | Path,
    method: str,
    flips: Mapping[str, Flip],
    prompts: Sequence[str],
    *,
    folder: str | Path | None = None,
    max_tokens: int = 48,
    **options: Any,
) -> list[Effect]:
    """Measure the acceptance length of a head at temperature 0, without and with each flip.

    target: the model. method: the head's. folder: the head's checkpoint; None: the one that comes with the target.
    flips: {name: flip}. options: further keys of speculative_config.
    """
    config = {"method": method, "num_speculative_tokens": 4, **options} | ({"model": str(folder)} if folder else {})
    plugins = FlippingPlugins.load()
    plugins.method, plugins.more_taps = method, tuple(tap for flip in flips.values() for tap in flip.more_taps)
    plugins.switch = switch = Switch()
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": len(prompts)}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(target, plugins=plugins, speculative_config=config, **sizes) as llm:

        def acceptance(flip: Flip) -> float:
            undo = switch.turn_to(flip)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            undo()
            return sum((output.speculation for output in outputs), DraftCounts()).acceptance_length

        before = acceptance(Flip())
        return [Effect(name, before, acceptance(flip)) for name, flip in flips.items()]


def earlier_token(observation: Observation) -> Observation:
    """Shift: each token has the hidden states of the token before it."""
    return _with_features(observation, {tap: value.roll(1, 0) for tap, value in observation.features.items()})


def own_embedding(observation: Observation) -> Observation:
    """Anchor: what should follow each token is the token itself."""
    tokens = observation.token_ids
    return attrs.evolve(observation, token_ids=tokens.roll(1, 0), next_token_ids=tokens[observation.last_rows])


def other_layers(taps: Mapping[str, str]) -> Flip:
    """Layer: in place of each tap, the hidden states of another one. taps: {tap of the head: tap to give it}."""

    def observed(observation: Observation) -> Observation:
        given = observation.features
        return _with_features(observation, {tap: given[taps.get(tap, tap)] for tap in given})

    return Flip(observed=observed, more_taps=tuple(dict.fromkeys(taps.values())))


def other_order(observation: Observation) -> Observation:
    """Layer: each tap has the hidden states of the next one. For heads with several taps."""
    given = observation.features
    return _with_features(observation, dict(zip(given, [*given.values()][1:] + [*given.values()][:1], strict=True)))


def not_itself(visibility: Visibility, window: int | None) -> tuple[Visibility, int | None]:
    """Causality: a token attends to the slots before its own only."""
    return attrs.evolve(visibility, prefix_lens=(visibility.prefix_lens - 1).clamp(min=1)), window


def short_window(visibility: Visibility, window: int | None) -> tuple[Visibility, int | None]:
    """Window: a token attends to itself and the token before it."""
    return visibility, 2


def wrong_norms(proposer: Proposer) -> Callable[[], None]:
    """Norm: the weights of all norms have the wrong sign in every second channel."""
    found = list(norms_of(proposer))
    assert found, f"{type(proposer).__name__} has no module with 'norm' or 'ln' in its name"

    @torch.no_grad()
    def flip() -> None:
        for weight in found:
            weight[::2].neg_()

    flip()
    return flip


def norms_of(proposer: Proposer) -> Iterator[torch.nn.Parameter]:
    """Yield the weights of the norms in a proposer's modules."""
    for module in _modules(list(vars(proposer).values())):
        for name, parameter in module.named_parameters():
            if "norm" in name or ".ln." in f".{name}":
                yield parameter


FLIPS = {
    "shift": Flip(observed=earlier_token),
    "anchor": Flip(observed=own_embedding),
    "causality": Flip(seen=not_itself),
    "window": Flip(seen=short_window),
    "norm": Flip(built=wrong_norms),
}
"""Flips of what heads with attention have in common. Those without attention have "shift" and "norm" in common."""


def _with_features(observation: Observation, features: Mapping[str, torch.Tensor]) -> Observation:
    return attrs.evolve(observation, features=features)


def _modules(values: Sequence[Any]) -> Iterator[torch.nn.Module]:
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _modules(value)
        elif attrs.has(type(value)) and type(value).__module__.startswith("specdec_proposer"):
            yield from _modules([getattr(value, field.name) for field in attrs.fields(type(value))])


@attrs.define
class Switch:
    """Which flip is on, and the proposer that it is for."""

    flip: Flip = Flip()
    proposer: Any = None

    def turn_to(self, flip: Flip) -> Callable[[], None]:
        """Turn a flip on. Returns a function that turns it off."""
        self.flip = flip
        undo = flip.built(self.proposer) if flip.built is not None else lambda: None

        def off() -> None:
            undo()
            self.flip = Flip()

        return off


class FlippedProposer(Proposer):
    """Forwards all calls to a proposer. It observes what the flip makes of the observations."""

    def __init__(self, inner: Proposer, switch: Switch) -> None:
        self._inner, self._switch = inner, switch

    def start(self, request: RequestView) -> None:
        self._inner.start(request)

    def observe(self, observation: Observation) -> None:
        flip = self._switch.flip
        self._inner.observe(observation if flip.observed is None else flip.observed(observation))

    def propose(self, batch: ProposerBatch) -> Draft:
        return self._inner.propose(batch)

    def reset(self, request: RequestView) -> None:
        self._inner.reset(request)

    def finish(self, request: RequestView, reason: str) -> None:
        self._inner.finish(request, reason)


class FlippedAttention:
    """Forwards all calls to the engine's `LayerAttention`. The layers see what the flip makes of their mask."""

    def __init__(self, inner: Any, switch: Switch) -> None:
        self._inner, self._switch = inner, switch

    def forwarding(
        self, metadata: KVMetadata, visibility: Visibility, window: int | None = None, rows: Any = None
    ) -> Any:
        if self._switch.flip.seen is not None:
            visibility, window = self._switch.flip.seen(visibility, window)
        return self._inner.forwarding(metadata, visibility, window, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FlippingPlugins(Plugins):
    """The installed plugins. The proposer of the method `method` is wrapped, so that `switch` can flip things of it.
    more_taps: hidden states to give it besides those in its Plan."""

    method: str
    more_taps: tuple[str, ...]
    switch: Switch

    def proposer(self, name: str) -> ProposerSpec:
        spec = super().proposer(name)
        if name != self.method:
            return spec

        def plan(*given: Any) -> Plan:
            found = spec.plan(*given)
            return attrs.evolve(found, taps=tuple(dict.fromkeys((*found.taps, *self.more_taps))))

        return attrs.evolve(spec, plan=plan, build=lambda config, context: self._build(spec, config, context))

    def _build(self, spec: ProposerSpec, config: Any, context: BuildContext) -> Proposer:
        lent: Any = context
        if context.attention is not None:
            lent = attrs.evolve(lent, attention=FlippedAttention(context.attention, self.switch))
        self.switch.proposer = spec.build(config, lent)
        return FlippedProposer(self.switch.proposer, self.switch)
