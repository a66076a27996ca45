"""Finds out in a trial forward pass whether a model is a stack of decoder layers as `ops.decoder` has them.

No family's name decides. The calls of leaf modules in a layer, written as a string, must match `PATTERN`. Then the
reference in `ops.decoder` must give the same bits as each of the model's layers, and what comes after the layers the
same logits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, field
from torch import nn

from specdec_core.models.attention import attention_sites
from specdec_core.models.decoder import RecordedDecoder
from specdec_core.models.embedding_and_head import EmbeddingAndHead
from specdec_core.models.families import ATTENTION_KEYWORDS
from specdec_core.ops.decoder import ACTIVATIONS, Angles, DecoderLayer, Linears, Norm

logger = logging.getLogger(__name__)

PATTERN = re.compile(r"N(?:L(?P<q>N?)L(?P<k>N?)L|LLL(?P<both>NN)|L)AL(?P<attention>N?)NLFL?L(?P<down>N?)")
"""The calls in a layer: N is a norm, L a linear layer, A attention, F an activation."""

NUM_TRIALS = 5


def record_decoder(
    model: Any,
    backbone: nn.Module,
    layers: nn.ModuleList,
    attention_modules: Sequence[nn.Module],
    factors: EmbeddingAndHead,
    max_model_len: int,
) -> RecordedDecoder | None:
    """Run a trial forward pass. Returns the model's parts if the model is a stack of decoder layers, else None.

    max_model_len: the largest position is below it.
    """
    embedding = model.get_input_embeddings()
    device = embedding.weight.device
    token_ids = torch.arange(NUM_TRIALS, device=device).unsqueeze(0) % embedding.weight.shape[0]
    positions = torch.linspace(0, max_model_len - 1, NUM_TRIALS, device=device).long().unsqueeze(0)
    trial = RecordingSite(positions)
    try:
        with ExitStack() as hooks:
            trial.listen(hooks, backbone, layers)
            hooks.enter_context(attention_sites(attention_modules, trial))
            logits = model(token_ids, position_ids=positions, use_cache=False).logits
        names = {module: name for name, module in model.named_modules()}
        found = trial.found(lambda ids: factors.embed(embedding, ids), names, max_model_len)
        if found is None or not trial.agrees(found, token_ids):
            return None
        agrees = torch.equal(factors.logits(model.get_output_embeddings(), trial.final), logits)
    except Exception:  # a model of another kind, whose parts do not fit together
        logger.debug("the layers of %s are not fused", type(model).__name__, exc_info=True)
        return None
    return found if agrees else None


def record_layer(
    head: nn.Module, layer: nn.Module, attention: nn.Module, forward: Callable[[], object]
) -> DecoderLayer | None:
    """Run a trial forward pass of a draft head with one decoder layer of transformers. Returns the layer as data,
    for `DecoderStack`, if it is of the kind that `DecoderLayer` has, else None.

    head: with the rotary embedding outside of the layer.
    attention: the module of `layer` that calls transformers' attention function `LayerAttention.implementation`, before
        it is bound to a KV cache.
    forward: runs the head on a few tokens.
    """
    trial = RecordingSite(torch.empty(0))
    try:
        with ExitStack() as hooks:
            trial.listen(hooks, head, nn.ModuleList([layer]))
            hooks.enter_context(attention_sites([attention], trial))
            forward()
        (calls,) = trial.layers
        found = trial.layer(calls)
        is_right = found is not None and _gives_the_same(found, calls, trial.ropes[found.rope][3])
    except Exception:  # a layer of another kind
        logger.debug("the layer of %s is not fused", type(head).__name__, exc_info=True)
        return None
    return found if is_right else None


@define(eq=False)
class _LayerCalls:
    """What one layer did in the trial forward pass. calls: the letters of `PATTERN`, and what was called."""

    given: Any
    angles: list[Any]
    calls: list[tuple[str, Any]] = field(factory=list)
    heads: tuple[int, int, int] = (0, 0, 0)  # num_heads, num_kv_heads, head_dim
    scaling: float = 0.0
    features: dict[str, Any] = field(factory=dict)
    output: torch.Tensor | None = None


@define(eq=False)
class RecordingSite:
    """Records a trial forward pass. Stands in for `CacheSite`: attention is `_mixed`."""

    positions: torch.Tensor
    layers: list[_LayerCalls] = field(factory=list)
    ropes: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Angles]] = field(factory=list)
    after: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = field(factory=list)
    final: Any = None

    def listen(self, hooks: ExitStack, backbone: nn.Module, layers: nn.ModuleList) -> None:
        """Register hooks on the model's modules, which `hooks` removes."""
        inner = {module for layer in layers for module in layer.modules()}
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(self._leave))
        for module in backbone.modules():
            if not list(module.children()):
                hook = self._call if module in inner else self._call_outside
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        hooks.enter_context(backbone.register_forward_hook(self._finish))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        angles = [each for each in (*args, *kwargs.values()) if isinstance(each, tuple) and len(each) == 2]
        self.layers.append(_LayerCalls(given, angles))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.layers[-1].output = output[0] if isinstance(output, tuple) else output

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.final = getattr(output, "last_hidden_state", None)

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
            self.layers[-1].calls += _named(module, given, output)
        else:
            self.layers[-1].calls.append(("?", module))

    def _call_outside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2:
            self.ropes.append((module, args, kwargs, output))
        elif args and isinstance(output, torch.Tensor):
            self.after.append((module, args[0], output))

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        features: Mapping[str, Any],
    ) -> torch.Tensor:
        layer = self.layers[-1]
        layer.calls.append(("A", None))
        layer.heads = query.shape[1], key.shape[1], query.shape[2]
        layer.scaling = query.shape[2] ** -0.5 if scaling is None else scaling
        layer.features = {argument: features.get(keyword) for keyword, argument in ATTENTION_KEYWORDS.items()}
        return _mixed(query, key, value)

    def found(
        self, embed: Callable[[torch.Tensor], torch.Tensor], names: Mapping[nn.Module, str], max_model_len: int
    ) -> RecordedDecoder | None:
        """Return the model's parts. None if it has others than a decoder's. names: of all modules."""
        layers = [self.layer(calls) for calls in self.layers]
        norms = [module for module, given, out in self.after if given is self.layers[-1].output and out is self.final]
        if not layers or any(layer is None for layer in layers) or not norms:
            return None
        every = torch.arange(max_model_len, device=self.positions.device).unsqueeze(0)
        ropes = []
        for module, args, kwargs, _ in self.ropes:
            at = {name: self._at(each, every) for name, each in kwargs.items()}
            cos, sin = module(*(self._at(each, every) for each in args), **at)
            ropes.append((cos[0].contiguous(), sin[0].contiguous()))
        known = tuple(layer for layer in layers if layer is not None)
        return RecordedDecoder(embed, known, tuple(ropes), names[norms[0]])

    def _at(self, argument: Any, positions: torch.Tensor) -> Any:
        return positions if argument is self.positions else argument

    def layer(self, found: _LayerCalls) -> DecoderLayer | None:
        """Return a layer as data. None if its calls do not match `PATTERN`."""
        match = PATTERN.fullmatch("".join(letter for letter, _ in found.calls))
        ropes = [i for i, (*_, output) in enumerate(self.ropes) if any(each is output for each in found.angles)]
        if match is None or not ropes:
            return None
        norms = iter(part for letter, part in found.calls if letter == "N")
        linears = [part for letter, part in found.calls if letter == "L"]
        (activation,) = (part for letter, part in found.calls if letter == "F")
        attention = [letter for letter, _ in found.calls].index("A")
        num_before = sum(letter == "L" for letter, _ in found.calls[:attention])
        num_heads, num_kv_heads, head_dim = found.heads
        return DecoderLayer(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            input_norm=next(norms),
            query_key_value=Linears(tuple(linears[:num_before])),
            query_norm=next(norms) if match["q"] or match["both"] else None,
            key_norm=next(norms) if match["k"] or match["both"] else None,
            rope=ropes[0],
            scaling=found.scaling,
            features=found.features,
            attention_output=Linears((linears[num_before],)),
            attention_norm=next(norms) if match["attention"] else None,
            mlp_norm=next(norms),
            gate_and_up=Linears(tuple(linears[num_before + 1 : -1])),
            activation=activation,
            down=Linears((linears[-1],)),
            down_norm=next(norms) if match["down"] else None,
        )

    def agrees(self, found: RecordedDecoder, token_ids: torch.Tensor) -> bool:
        """Return whether the parts give the same bits as the model's own modules in the trial forward pass."""
        at = self.positions[0]
        hidden: torch.Tensor | None = found.embed(token_ids)
        for layer, calls in zip(found.layers, self.layers, strict=True):
            cos, sin = (table[at].unsqueeze(0) for table in found.ropes[layer.rope])
            if hidden is None or not torch.equal(hidden, calls.given) or not _gives_the_same(layer, calls, (cos, sin)):
                return False
            hidden = calls.output
        return True


def _gives_the_same(layer: DecoderLayer, calls: _LayerCalls, angles: Angles) -> bool:
    """Return whether a layer as data gives the same bits as its modules did in the trial forward pass."""
    return calls.output is not None and torch.equal(layer.forward(calls.given, *angles, _mixed_heads), calls.output)


def _named(module: nn.Module, given: torch.Tensor, output: torch.Tensor) -> list[tuple[str, Any]]:
    """Return what a leaf module is, with its letter: [] if it changes nothing, like dropout."""
    if torch.equal(given, output):
        return []
    if type(module) is nn.Linear:
        return [("L", module)]
    for norm in _norms(module):
        if torch.equal(norm(given), output):
            return [("N", norm)]
    for name, activation in ACTIVATIONS.items():
        if torch.equal(activation(given), output):
            return [("F", name)]
    return [("?", module)]


def _norms(module: nn.Module) -> Iterator[Norm]:
    """Yield the norms that a module with this weight may be."""
    eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
    if isinstance(eps, float) and isinstance(weight, torch.Tensor) and weight.dim() == 1:
        weight = weight.detach()
        yield Norm(weight, eps, rounds_first=True)
        yield Norm(1 + weight.float(), eps, rounds_first=False)


def _mixed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A function in place of attention, in which each of query, key and value matters: [n, heads, head_dim] each,
    returns [n, num_heads, head_dim]."""
    own = value + key.mean(dim=-1, keepdim=True)
    return own.repeat_interleave(query.shape[1] // value.shape[1], dim=1) + query.mean(dim=-1, keepdim=True)


def _mixed_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mixed = _mixed(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return mixed.flatten(1).unsqueeze(0)
