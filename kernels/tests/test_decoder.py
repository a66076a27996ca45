"""Fused decoder layers agree with the reference. A token gets the same bits whatever else is in the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, settings, strategies as st
from passes import Heads, Pass, Request, make_pass, requests
from torch.nn.functional import linear

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE
from specdec_core.ops.decoder import DecoderLayer, Norm
from specdec_kernels.cpu import OPS, lanes
from specdec_kernels.cpu.lanes import is_supported

WIDTH, ENTERING, LONGEST = 48, 32, 400
TREE = (-1, -1, 0, 0, DEAD, 1, 2, 2)
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not is_supported(dtype), reason=f"this CPU lacks {needed}"))
    for dtype, needed in lanes.NEEDED.items()
]
needs_float32 = pytest.mark.skipif(not is_supported(torch.float32), reason="this CPU lacks avx2 or fma")


class Drawn:
    """Layers with random weights. exact: the same in float64, by torch alone; plain: by torch in
    the layers' own dtype."""

    def __init__(self, data: Any, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
        self.dtype = dtype
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
        num_heads, inner = num_kv_heads * self.heads.groups, 32
        parts: dict[str, tuple[Any, ...]] = {
            "query_key_value": self._product((num_heads + 2 * num_kv_heads) * dim, WIDTH + (ENTERING if enters else 0)),
            "attention_output": self._product(WIDTH, num_heads * dim),
            "gate_and_up": self._product(2 * inner, WIDTH),
            "down": self._product(WIDTH, inner),
            "entering_norm": self._norm(ENTERING) if enters and self._flags["enters_normed"] else (None,) * 3,
            "input_norm": self._norm(WIDTH) if self._flags["input_norm"] else (None,) * 3,
            "mlp_norm": self._norm(WIDTH),
        }
        for name, flag in (("query_norm", "head_norm"), ("key_norm", "head_norm")):
            parts[name] = self._norm(dim) if self._flags[flag] else (None,) * 3
        for name in ("attention_norm", "down_norm"):
            parts[name] = self._norm(WIDTH) if self._flags["output_norm"] else (None,) * 3
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
            OPS["pack_linear"](weight, bias),
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

    def __init__(self, data: Any, dtype: torch.dtype, batch: list[Request] | None = None) -> None:
        self.drawn = Drawn(data, dtype)
        batch = batch or data.draw(st.lists(requests(), min_size=1, max_size=4))
        self.made: Pass = make_pass(batch, self.drawn.heads, data.draw(st.sampled_from([3, 16])), dtype, num_padding=3)
        lengths = self.made.plan.metadata.lengths
        self.hidden = self.drawn.normal(sum(lengths) + 3, WIDTH)
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
        run = OPS["fuse_layers"](self.drawn.layers[:num_layers])
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
        run, at = OPS["fuse_layers"](self.drawn.layers), self.positions[row : row + 1]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), window=st.none() | st.integers(1, 90))
def test_they_agree_with_the_reference_in_float64(dtype: torch.dtype, data: Any, window: int | None) -> None:
    run = Run(data, dtype)
    assert_as_exact_as_torch(run, run.fused(window), window)


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


@needs_float32
@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_each_part_matters(part: str, data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 9), Request(40, 1, TREE)])
    _, second = layers = list(run.drawn.layers)
    at = 0 if part == "entering_norm" else 1
    assume((second.features["window"] or 9) > 3)  # a token that attends only to itself is scaled to no effect
    if getattr(layers[at], part) is not None:
        found = run.fused()
        layers[at] = evolve(layers[at], **{part: PARTS[part](getattr(layers[at], part))})
        run.drawn.layers = layers
        assert (run.fused() - found).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any) -> None:
    run = Run(data, dtype)
    together = run.fused()
    for request, start in enumerate(run.made.rows(b).start for b in range(len(run.made.requests))):
        lengths = run.made.plan.metadata.lengths
        for token in range(0, lengths[request], 3):
            assert torch.equal(run.alone(request, token), together[start + token]), (request, token)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, data: Any) -> None:
    run, num_threads = Run(data, dtype), torch.get_num_threads()
    expected = run.fused()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(run.fused(), expected)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_token_of_a_long_prompt_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any) -> None:
    run = Run(data, dtype, [Request(20, 1, TREE), Request(7, 90), Request(5, 2)])
    found = run.fused()
    assert_as_exact_as_torch(run, found)
    start = len(found) - 92
    for request, token, row in ((0, 1, 1), (1, 0, start), (1, 63, start + 63), (1, 89, start + 89), (2, 1, start + 91)):
        assert torch.equal(run.alone(request, token), found[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_outputs_of_some_tokens_are_those_of_all(dtype: torch.dtype, data: Any) -> None:
    run = Run(data, dtype, [Request(20, 2), Request(7, 90), Request(5, 12)])
    expected, stored = run.fused(), run.stored
    lasts = torch.tensor([1, 91, 103, 0])  # and a row of padding
    plan, caches = run.made.fresh_plan(), [[each.clone() for each in cache] for cache in run.caches]
    plan = evolve(plan, metadata=evolve(plan.metadata, slot_mapping=run.slots[:-3]))
    fused = OPS["fuse_layers"](run.drawn.layers)
    cache = caches, run.slots, plan, None
    found = fused(run.hidden, run.ropes, run.positions, *cache, run.entering, lasts, plan.of_rows(lasts))
    assert torch.equal(found[:3], expected[[1, 91, 103]])
    for ours, theirs in zip(caches, stored, strict=True):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5, deadline=None)
@given(data=st.data(), wanted=st.sets(st.sampled_from([0, 1])))
def test_inputs_of_layers_are_written_where_they_are_wanted(dtype: torch.dtype, data: Any, wanted: set[int]) -> None:
    run = Run(data, dtype, [Request(20, 2), Request(40, 1, TREE), Request(7, 90)])
    expected = run.fused()
    copied = sorted(wanted, reverse=True)
    copies = torch.full((len(copied), *run.hidden.shape), 7, dtype=dtype)
    assert torch.equal(run.fused(copied=copied, copies=copies), expected)
    given = run.hidden[:-3], run.fused(num_layers=1)
    assert all(torch.equal(copy[:-3], given[layer]) for layer, copy in zip(copied, copies, strict=True))
    fused, cache = OPS["fuse_layers"](run.drawn.layers), (run.caches, run.slots, run.made.fresh_plan(), None)
    for layers in ([1], [0], [0, 1], [], [1, 0]):  # others in each forward pass
        copies = torch.full((2, *run.hidden.shape), 7, dtype=dtype)[: len(layers)]
        found = fused(run.hidden, run.ropes, run.positions, *cache, run.entering, copied=layers, copies=copies)
        assert torch.equal(found[:-3], expected)
        assert all(torch.equal(copy[:-3], given[layer]) for layer, copy in zip(layers, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_what_is_not_finite_stays_with_its_request(poison: float, dtype: torch.dtype, data: Any) -> None:
    run = Run(data, dtype, [Request(20, 2), Request(40, 1, TREE), Request(5, 1)])
    expected = run.fused()
    run.hidden[5, 3] = poison
    found = run.fused()
    assert not found[5].isfinite().any()
    assert torch.equal(found[:2], expected[:2])
    assert torch.equal(found[-1], expected[-1])


@needs_float32
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_what_does_not_fit_is_refused(data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 2)])
    ropes = run.ropes
    for change in (torch.Tensor.double, lambda table: table[0], lambda table: table[:, :2], lambda table: table[:0]):
        run.ropes = [tuple(map(change, pair)) for pair in ropes]
        with pytest.raises(ValueError, match="cos or sin"):
            run.fused()
    run.ropes, positions = [(ropes[0][0], ropes[0][1][1:])], run.positions
    with pytest.raises(ValueError, match="cos or sin"):
        run.fused()
    run.ropes = ropes
    for wrong in (positions.int(), positions[1:], positions[None]):
        run.positions = wrong
        with pytest.raises(ValueError, match="positions is"):
            run.fused()
    run.positions, slots = positions, run.slots
    for run.slots in (slots.int(), slots[1:], slots[None]):
        with pytest.raises(ValueError, match="slot_mapping is"):
            run.fused()
    run.slots = slots
    run.ropes, run.positions = [tuple(each[:4] for each in ropes[0])], None
    with pytest.raises(ValueError, match="fewer rows than the 5 tokens"):
        run.fused()
    run.ropes, run.positions = ropes, positions
    keys, values = run.caches[1]
    if run.drawn.enters:
        entering = run.entering
        for run.entering in (None, entering.double(), entering[:, :9], entering[1:]):
            with pytest.raises(ValueError, match="the input of query, key and value begins with 32 columns"):
                run.fused()
        run.entering = entering
    right = run.hidden[None]
    for wrong in (None, right[0], right.double(), right[:, 1:], right.repeat(2, 1, 1), right.mT.contiguous().mT):
        with pytest.raises(ValueError, match="copies is"):
            run.fused(copied=[1], copies=wrong)
    for cache in (
        [keys.double(), values],
        [keys, values.transpose(1, 2)],
        [keys[:, :, :8], values],
        [keys[:4], values],
    ):
        run.caches[1] = cache
        with pytest.raises(ValueError, match="KV cache"):
            run.fused()


@needs_float32
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_caches_that_were_refused_are_not_used_later(data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 2)])
    layers = OPS["fuse_layers"](run.drawn.layers[:2])
    caches = [[each.clone() for each in cache] for cache in run.caches[:2]]
    wrong = [[torch.full_like(each, torch.nan) for each in caches[0]], [each.double() for each in caches[1]]]

    def outputs(given: list[list[torch.Tensor]]) -> torch.Tensor:
        plan = run.made.fresh_plan()
        found: torch.Tensor = layers(run.hidden, run.ropes, run.positions, given, run.slots, plan, None, run.entering)
        return found[:-3]

    expected = outputs(caches)
    with pytest.raises(ValueError, match="KV cache"):
        outputs(wrong)
    assert torch.equal(outputs(caches), expected)


@needs_float32
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_cosines_may_be_given_by_token_and_tables_may_change(data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 2), Request(40, 1, TREE)])
    expected, tables, positions = run.fused(), run.ropes, run.positions
    fused = OPS["fuse_layers"](run.drawn.layers)

    def again() -> torch.Tensor:
        cache = [[each.clone() for each in cache] for cache in run.caches], run.slots, run.made.fresh_plan()
        found: torch.Tensor = fused(run.hidden, run.ropes, run.positions, *cache, None, run.entering)
        return found[:-3]

    assert torch.equal(again(), expected)
    run.ropes, run.positions = [tuple(each[positions].T.contiguous().T for each in tables[0])], None
    assert torch.equal(again(), expected)
    run.ropes, run.positions = tables, positions
    assert torch.equal(again(), expected)
    run.ropes = [(tables[0][0], -tables[0][1])]
    # In a window of 1, a token sees itself only, wherever it is.
    assert torch.equal(again(), expected) == all(layer.features["window"] == 1 for layer in run.drawn.layers)


@needs_float32
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_positions_outside_of_the_tables_take_the_nearest_row(data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 2)])
    run.positions = torch.tensor([LONGEST - 1, 0, 0, 0, 0])
    expected = run.fused()
    run.positions = torch.tensor([LONGEST + 9, -3, 0, 0, 0])
    assert torch.equal(run.fused(), expected)


@needs_float32
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_strides_of_hidden_states_do_not_matter(data: Any) -> None:
    run = Run(data, torch.float32, [Request(20, 2), Request(40, 1, TREE)])
    expected = run.fused()
    run.hidden = run.hidden.T.contiguous().T
    assert torch.equal(run.fused(), expected)


@needs_float32
@settings(max_examples=1, deadline=None)
@given(data=st.data())
def test_layers_that_it_does_not_know_are_left_to_the_model(data: Any) -> None:
    fuse, (layer, other) = OPS["fuse_layers"], Drawn(data, torch.float32).layers
    assert fuse([layer, other]) is not None
    assert fuse([layer, evolve(other, down=lambda rows: rows)]) is None
    assert fuse([evolve(other, entering_norm=Norm(torch.ones(WIDTH), 1e-5, True))]) is None  # nothing enters
    assert fuse([layer, evolve(other, num_heads=other.num_heads + 1)]) is None
    assert REFERENCE["fuse_layers"]([layer, other]) is None
