"""Fused decoder layers agree with the reference. A token gets the same bits whatever else is in the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from decoder_runs import (
    LONGEST,
    PARTS,
    TREE,
    Drawn,
    Run,
    assert_as_exact_as_torch,
    assert_that_it_matters,
    assert_that_others_are_left,
)
from hypothesis import given, settings, strategies as st
from passes import Request

from specdec_core.ops import REFERENCE
from specdec_kernels.cpu import OPS, lanes
from specdec_kernels.cpu.lanes import is_supported

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not is_supported(dtype), reason=f"this CPU lacks {needed}"))
    for dtype, needed in lanes.NEEDED.items()
]
needs_float32 = pytest.mark.skipif(not is_supported(torch.float32), reason="this CPU lacks avx2 or fma")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), window=st.none() | st.integers(1, 90))
def test_they_agree_with_the_reference_in_float64(dtype: torch.dtype, data: Any, window: int | None) -> None:
    run = Run(OPS, data, dtype)
    assert_as_exact_as_torch(run, run.fused(window), window)


@needs_float32
@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_each_part_matters(part: str, data: Any) -> None:
    assert_that_it_matters(part, Run(OPS, data, torch.float32, [Request(20, 9), Request(40, 1, TREE)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any) -> None:
    run = Run(OPS, data, dtype)
    together = run.fused()
    for request, start in enumerate(run.made.rows(b).start for b in range(len(run.made.requests))):
        lengths = run.made.plan.metadata.lengths
        for token in range(0, lengths[request], 3):
            assert torch.equal(run.alone(request, token), together[start + token]), (request, token)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, data: Any) -> None:
    run, num_threads = Run(OPS, data, dtype), torch.get_num_threads()
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
    run = Run(OPS, data, dtype, [Request(20, 1, TREE), Request(7, 90), Request(5, 2)])
    found = run.fused()
    assert_as_exact_as_torch(run, found)
    start = len(found) - 92
    for request, token, row in ((0, 1, 1), (1, 0, start), (1, 63, start + 63), (1, 89, start + 89), (2, 1, start + 91)):
        assert torch.equal(run.alone(request, token), found[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_outputs_of_some_tokens_are_those_of_all(dtype: torch.dtype, data: Any) -> None:
    run = Run(OPS, data, dtype, [Request(20, 2), Request(7, 90), Request(5, 12)])
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
    run = Run(OPS, data, dtype, [Request(20, 2), Request(40, 1, TREE), Request(7, 90)])
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
    run = Run(OPS, data, dtype, [Request(20, 2), Request(40, 1, TREE), Request(5, 1)])
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
    run = Run(OPS, data, torch.float32, [Request(20, 2)])
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
    run = Run(OPS, data, torch.float32, [Request(20, 2)])
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
    run = Run(OPS, data, torch.float32, [Request(20, 2), Request(40, 1, TREE)])
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
    run = Run(OPS, data, torch.float32, [Request(20, 2)])
    run.positions = torch.tensor([LONGEST - 1, 0, 0, 0, 0])
    expected = run.fused()
    run.positions = torch.tensor([LONGEST + 9, -3, 0, 0, 0])
    assert torch.equal(run.fused(), expected)


@needs_float32
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_strides_of_hidden_states_do_not_matter(data: Any) -> None:
    run = Run(OPS, data, torch.float32, [Request(20, 2), Request(40, 1, TREE)])
    expected = run.fused()
    run.hidden = run.hidden.T.contiguous().T
    assert torch.equal(run.fused(), expected)


@needs_float32
@settings(max_examples=1, deadline=None)
@given(data=st.data())
def test_layers_that_it_does_not_know_are_left_to_the_model(data: Any) -> None:
    assert_that_others_are_left(OPS, data)
    assert REFERENCE["fuse_layers"](Drawn(OPS, data, torch.float32).layers) is None
