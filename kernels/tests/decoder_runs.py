"""Random decoder layers, and forward passes through them, to test `fuse_layers` with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve
from hypothesis import assume, strategies as st
from passes import Heads, Pass, Request, make_pass, requests
from torch.nn.functional import linear

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE
from specdec_core.ops.decoder import DecoderLayer, Norm

ENTERING, LONGEST = 32, 400
TREE = (-1, -1, 0, 0, DEAD, 1, 2, 2)


class Drawn:
    """Layers with random weights, whose products are those of `ops`. exact: the same in float64, by torch alone; plain:
    by torch in the layers' own dtype."""

    def __init__(self, ops: Any, data: Any, dtype: torch.dtype) -> None:
        self.ops = ops
        self._generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
        self.dtype = dtype
        self.width = data.draw(st.sampled_from([48, 64]))
        self.heads = Heads(data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 3)), 16, 16)
        self._flags = {
            name: data.draw(st.booleans())
            for name in ("bias", "head_norm", "rounds_first", "output_norm", "enters", "enters_normed", "input_norm")
        }
        self._activation = data.draw(st.sampled_from(["silu", "gelu_tanh"]))
        features = {"window": st.none() | st.integers(1, 90), "softcap": st.none() | st.just(3.0)}
        drawn = [{name: data.draw(each) for name, each in features.items()} for _ in range(2)]
        self.enters = self._flags["enters"]
        forms = [self._layer(drawn[0], self.enters), self._layer(drawn[1], False)]
        self.layers, self.exact, self.plain = zip(*forms, strict=True)
        angles = torch.randn(LONGEST, 8, generator=self._generator)
        self.cos, self.sin = (each.repeat(1, 2).to(dtype) for each in (angles.cos(), angles.sin()))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def _layer(self, features: dict[str, Any], enters: bool) -> list[DecoderLayer]:
        num_kv_heads, dim = self.heads.num_kv_heads, self.heads.key_dim
        num_heads, inner, entering = num_kv_heads * self.heads.groups, 32, ENTERING if enters else 0
        parts: dict[str, tuple[Any, ...]] = {
            "query_key_value": self._product((num_heads + 2 * num_kv_heads) * dim, self.width + entering),
            "attention_output": self._product(self.width, num_heads * dim),
            "gate_and_up": self._product(2 * inner, self.width),
            "down": self._product(self.width, inner),
            "entering_norm": self._norm(ENTERING) if enters and self._flags["enters_normed"] else (None,) * 3,
            "input_norm": self._norm(self.width) if self._flags["input_norm"] else (None,) * 3,
            "mlp_norm": self._norm(self.width),
        }
        for name, flag in (("query_norm", "head_norm"), ("key_norm", "head_norm")):
            parts[name] = self._norm(dim) if self._flags[flag] else (None,) * 3
        for name in ("attention_norm", "down_norm"):
            parts[name] = self._norm(self.width) if self._flags["output_norm"] else (None,) * 3
        sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": dim}
        sizes |= {"rope": 0, "scaling": 0.3}
        return [
            DecoderLayer(**sizes, features=features, activation=self._activation, **{k: v[i] for k, v in parts.items()})
            for i in range(3)
        ]

    def _product(self, num_out: int, num_in: int) -> tuple[Any, ...]:
        weight = (self.normal(num_out, num_in) * num_in**-0.5).to(self.dtype)
        bias = self.normal(num_out) if self._flags["bias"] else None
        exact = weight.double(), None if bias is None else bias.double()
        return (
            self.ops["pack_linear"](weight, bias),
            lambda rows: linear(rows, *exact),
            lambda rows: linear(rows, weight, bias),
        )

    def _norm(self, width: int) -> tuple[Any, ...]:
        weight = 1 + 0.3 * self.normal(width).float()
        norm = Norm(weight.to(self.dtype) if self._flags["rounds_first"] else weight, 1e-5, self._flags["rounds_first"])
        rounded = norm.weight.double()
        return norm, lambda rows: rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * rounded, norm


class Run:
    """A forward pass of random tokens through the layers."""

    def __init__(self, ops: Any, data: Any, dtype: torch.dtype, batch: list[Request] | None = None) -> None:
        self.ops, self.drawn = ops, Drawn(ops, data, dtype)
        batch = batch or data.draw(st.lists(requests(), min_size=1, max_size=4))
        self.made: Pass = make_pass(batch, self.drawn.heads, data.draw(st.sampled_from([3, 16])), dtype, num_padding=3)
        lengths = self.made.plan.metadata.lengths
        self.hidden = self.drawn.normal(sum(lengths) + 3, self.drawn.width)
        self.entering = self.drawn.normal(len(self.hidden), ENTERING) if self.drawn.enters else None
        self.caches = [
            [self.drawn.normal(*each.shape).where(each.isfinite(), each) for each in (self.made.keys, self.made.values)]
            for _ in self.drawn.layers
        ]
        own = [
            self.made.slots(i, list(range(request.num_computed, request.num_computed + n)))
            for i, (request, n) in enumerate(zip(self.made.requests, lengths, strict=True))
        ]
        self.slots = torch.cat([*own, torch.full((3,), -1)])
        self.ropes, self.positions = [(self.drawn.cos, self.drawn.sin)], self.made.plan.visibility.positions

    def fused(self, window: int | None = None, *, num_layers: int = 2, **options: Any) -> torch.Tensor:
        """Returns the result without padding. Afterwards, `stored` are the caches with the tokens' keys and values."""
        self.stored = [[each.clone() for each in cache] for cache in self.caches][:num_layers]
        run = self.ops["fuse_layers"](self.drawn.layers[:num_layers])
        cache = self.stored, self.slots, self.made.fresh_plan()
        return run(self.hidden, self.ropes, self.positions, *cache, window, self.entering, **options)[:-3]

    def alone(self, request: int, token: int) -> torch.Tensor:
        """Run one token whose request has the keys and values of its path in its cache, in another order of slots."""
        path = self.made.requests[request].path(token)
        row = self.made.rows(request).start + token
        made = make_pass([Request(len(path) - 1, 1)], self.drawn.heads, 2, self.drawn.dtype, seed=row)
        places, here = made.slots(0, list(range(len(path)))), self.made.slots(request, path)
        caches = [[each.clone() for each in (made.keys, made.values)] for _ in self.stored]
        for cache, stored in zip(caches, self.stored, strict=True):
            for ours, theirs in zip(cache, stored, strict=True):
                ours[places[:-1]] = theirs[here[:-1]]
        run, at = self.ops["fuse_layers"](self.drawn.layers), self.positions[row : row + 1]
        entering = None if self.entering is None else self.entering[row : row + 1]
        return run(self.hidden[row : row + 1], self.ropes, at, caches, places[-1:], made.plan, None, entering)[0]

    def exact(self, window: int | None = None) -> torch.Tensor:
        """Compute the result in float64."""
        return self._one_by_one(self.drawn.exact, torch.float64, window)

    def plain(self, window: int | None = None) -> torch.Tensor:
        """Compute the result with torch's operations in the run's own dtype."""
        return self._one_by_one(self.drawn.plain, self.drawn.dtype, window)

    def _one_by_one(self, layers: Any, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        hidden, plan = self.hidden.to(dtype).unsqueeze(0), self.made.fresh_plan()
        cos, sin = (each[self.positions].to(dtype).unsqueeze(0) for each in self.ropes[0])
        entering = None if self.entering is None else self.entering.to(dtype).unsqueeze(0)
        for layer, cache in zip(layers, self.caches, strict=True):
            keys, values = (each.to(dtype, copy=True) for each in cache)
            own = [each for each in (layer.features["window"], window) if each is not None]
            features = {**layer.features, "window": min(own, default=None)}

            attend = partial(self._attend, keys, values, plan, partial(REFERENCE["paged_attention"], **features))
            hidden = layer.forward(hidden, cos, sin, partial(attend, layer.scaling), entering)
            entering = None
        return hidden[0, :-3]

    def _attend(
        self, keys: Any, values: Any, plan: Any, attention: Any, scaling: float, query: Any, key: Any, value: Any
    ) -> torch.Tensor:
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        REFERENCE["store_kv"](keys, values, self.slots, key, value)
        return attention(query, keys, values, plan, scaling).flatten(1).unsqueeze(0)


def assert_as_exact_as_torch(run: Run, found: torch.Tensor, window: int | None = None) -> None:
    """Assert that the errors are about those of torch's own operations in the same dtype: how large they are depends on
    the layers that were drawn."""
    exact = run.exact(window)
    ours, theirs = ((each.double() - exact).abs() for each in (found, run.plain(window)))
    assert ours.max() <= 3 * theirs.max() + 1e-5
    assert ours.mean() <= 2 * theirs.mean() + 1e-6


PARTS = {
    "entering_norm": lambda norm: evolve(norm, weight=-norm.weight),
    "input_norm": lambda norm: evolve(norm, eps=0.5),
    "mlp_norm": lambda norm: evolve(norm, weight=-norm.weight),
    "query_norm": lambda norm: None,
    "key_norm": lambda norm: None,
    "attention_norm": lambda norm: None,
    "down_norm": lambda norm: None,
    "scaling": lambda scaling: 2 * scaling,
    "features": lambda features: {**features, "window": 3},
    "activation": lambda name: "silu" if name == "gelu_tanh" else "gelu_tanh",
}


def assert_that_it_matters(part: str, run: Run) -> None:
    """Assert that the result is another one once a part of a layer is changed, if the layer has it."""
    _, second = layers = list(run.drawn.layers)
    at = 0 if part == "entering_norm" else 1
    assume((second.features["window"] or 9) > 3)  # a token that attends only to itself is scaled to no effect
    if getattr(layers[at], part) is not None:
        found = run.fused()
        layers[at] = evolve(layers[at], **{part: PARTS[part](getattr(layers[at], part))})
        run.drawn.layers = layers
        assert (run.fused() - found).abs().max() > 1e-3


def assert_that_others_are_left(ops: Any, data: Any) -> None:
    """Assert that `fuse_layers` returns None for layers that it does not know, or whose sizes do not fit."""
    fuse, drawn = ops["fuse_layers"], Drawn(ops, data, torch.float32)
    layer, other = drawn.layers
    assert fuse([layer, other]) is not None
    assert fuse([layer, evolve(other, down=lambda rows: rows)]) is None
    assert fuse([evolve(other, entering_norm=Norm(torch.ones(drawn.width), 1e-5, True))]) is None  # nothing enters
    assert fuse([layer, evolve(other, num_heads=other.num_heads + 1)]) is None
    assert fuse([layer, evolve(other, mlp_norm=Norm(torch.ones(drawn.width - 1), 1e-5, True))]) is None
    assert fuse([layer, evolve(other, key_norm=Norm(torch.ones(8), 1e-5, True))]) is None
    assert fuse([layer, evolve(other, activation="relu")]) is None
