"""Fused decoder layers as Triton kernels agree with the reference, and a token gets the same bits whatever else is in
the forward pass. They take the same tensors as those for CPUs, which ../test_decoder.py tests. The interpreter takes
seconds for a forward pass, so there are few of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from attrs import evolve
from decoder_runs import (
    LONGEST,
    PARTS,
    TREE,
    Run,
    assert_as_exact_as_torch,
    assert_that_it_matters,
    assert_that_others_are_left,
)
from hypothesis import Phase, given, settings, strategies as st
from passes import Request

from specdec_core.ops.decoder import ACTIVATIONS, Norm
from specdec_kernels.gpu import OPS
from specdec_kernels.gpu.gate import gated
from specdec_kernels.gpu.norm import add_and_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCH = [Request(20, 2), Request(9, 1, (-1, -1, 0, 1)), Request(70, 1)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def few(number: int) -> Any:
    """The first example is the simplest one, in which layers have no options."""
    return settings(max_examples=number, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@few(4)
@given(data=st.data(), window=st.none() | st.integers(1, 40))
def test_they_agree_with_the_reference_in_float64(dtype: torch.dtype, data: Any, window: int | None) -> None:
    run = Run(OPS, data, dtype, [Request(20, 2), Request(30, 1, TREE), Request(3, 5)])
    assert_as_exact_as_torch(run, run.fused(window), window)


@pytest.mark.parametrize("part", PARTS)
@few(2)
@given(data=st.data())
def test_each_part_matters(part: str, data: Any) -> None:
    assert_that_it_matters(part, Run(OPS, data, torch.float32, [Request(20, 1)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@few(2)
@given(data=st.data())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any) -> None:
    run = Run(OPS, data, dtype, BATCH)
    together, start = run.fused(), 0
    for request, length in enumerate(run.made.plan.metadata.lengths):
        for token in range(length):
            assert torch.equal(run.alone(request, token), together[start + token]), (request, token)
        start += length


@few(2)
@given(data=st.data())
def test_outputs_of_some_tokens_are_those_of_all(data: Any) -> None:
    run = Run(OPS, data, torch.bfloat16, [Request(20, 2), Request(7, 9)])
    expected, stored = run.fused(), run.stored
    lasts = torch.tensor([1, 10])
    plan, caches = run.made.fresh_plan(), [[each.clone() for each in cache] for cache in run.caches]
    plan = evolve(plan, metadata=evolve(plan.metadata, slot_mapping=run.slots[:-3]))
    cache = caches, run.slots, plan, None
    fused = OPS["fuse_layers"](run.drawn.layers)
    found = fused(run.hidden, run.ropes, run.positions, *cache, run.entering, lasts, plan.of_rows(lasts))
    assert torch.equal(found, expected[lasts])
    for ours, theirs in zip(caches, stored, strict=True):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True))


@few(2)
@given(data=st.data())
def test_inputs_of_layers_are_written_where_they_are_wanted(data: Any) -> None:
    run = Run(OPS, data, torch.bfloat16, BATCH)
    expected, given = run.fused(), (run.hidden[:-3], run.fused(num_layers=1))
    copies = torch.full((2, *run.hidden.shape), 7, dtype=torch.bfloat16)
    assert torch.equal(run.fused(copied=[1, 0], copies=copies), expected)
    assert all(torch.equal(copy[:-3], given[layer]) for layer, copy in zip([1, 0], copies, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@few(1)
@given(data=st.data())
def test_what_is_not_finite_stays_with_its_request(poison: float, data: Any) -> None:
    run = Run(OPS, data, torch.float32, [Request(20, 2), Request(5, 1)])
    expected = run.fused()
    run.hidden[2, 3] = poison
    found = run.fused()
    assert not found[2].isfinite().any()
    assert torch.equal(found[:2], expected[:2])


@few(1)
@given(data=st.data())
def test_slots_that_the_cache_does_not_have_are_not_written(data: Any) -> None:
    run = Run(OPS, data, torch.float32, [Request(20, 2)])
    run.caches = [[each.nan_to_num(7) for each in cache] for cache in run.caches]
    run.fused()
    first = run.stored
    for row, slot in ((-1, 10**9), (-2, len(run.caches[0][0])), (-3, -5)):
        run.slots[row] = slot
    run.fused()
    pairs = zip(chain(*run.stored), chain(*first), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@few(1)
@given(data=st.data())
def test_positions_outside_of_the_tables_take_the_nearest_row(data: Any) -> None:
    run = Run(OPS, data, torch.float32, [Request(20, 2)])
    run.positions = torch.tensor([LONGEST - 1, 0, 0, 0, 0])
    expected = run.fused()
    run.positions = torch.tensor([LONGEST + 9, -3, 0, 0, 0])
    assert torch.equal(run.fused(), expected)
    run.ropes, run.positions = [tuple(each[[LONGEST - 1, 0, 0, 0, 0]].T.contiguous().T for each in run.ropes[0])], None
    assert torch.equal(run.fused(), expected)


@few(1)
@given(data=st.data())
def test_what_does_not_fit_is_refused(data: Any) -> None:
    run = Run(OPS, data, torch.float32, [Request(20, 2)])

    def refuses(says: str, **wrong: Any) -> None:
        right = {name: getattr(run, name) for name in wrong}
        vars(run).update(wrong)
        with pytest.raises(ValueError, match=says):
            run.fused()
        vars(run).update(right)

    cos, sin = run.ropes[0]
    for tables in ((cos.double(), sin), (cos[0], sin), (cos, sin[:, :2]), (cos[:0], sin[:0]), (cos, sin[1:])):
        refuses("cos or sin", ropes=[tables])
    refuses("fewer rows than the 5 tokens", ropes=[(cos[:4], sin[:4])], positions=None)
    for positions in (run.positions.int(), run.positions[1:]):
        refuses("positions is", positions=positions)
    refuses("slot_mapping is", slots=run.slots.int())
    refuses("rows are", hidden=run.hidden.repeat(1, 2))
    keys, values = run.caches[1]
    for cache in ([keys.double(), values], [keys, values.transpose(1, 2)], [keys[:, :, :8], values]):
        refuses("KV cache", caches=[run.caches[0], cache])
    if run.drawn.enters:
        refuses("begins with 32 columns", entering=run.entering[:, :9])
    with pytest.raises(ValueError, match="copies is"):
        run.fused(copied=[1], copies=run.hidden)


@few(1)
@given(data=st.data())
def test_layers_that_it_does_not_know_are_left_to_the_model(data: Any) -> None:
    assert_that_others_are_left(OPS, data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_is_that_of_the_reference(activation: str, dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 1, -1, 3, -3, 30, -30, 1e4, -1e4, torch.inf, torch.nan])
    gate, up = numbers.to(dtype), torch.linspace(-2, 2, len(numbers)).to(dtype)
    found = gated(torch.cat([gate, up]).repeat(2, 1), activation)
    expected = ACTIVATIONS[activation](gate.double()) * up
    torch.testing.assert_close(found, expected.to(dtype).repeat(2, 1), rtol=ROUNDING[dtype], atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rounds_first", "rounds_added_first"), [(True, False), (False, True)])
def test_a_sum_is_rounded_before_it_is_normed(dtype: torch.dtype, rounds_first: bool, rounds_added_first: bool) -> None:
    def norm(seed: int, rounds: bool) -> Norm:
        weight = 1 + 0.3 * torch.randn(100, generator=torch.Generator().manual_seed(seed))
        return Norm(weight.to(dtype) if rounds else weight, 1e-5, rounds)

    hidden, added = torch.randn(2, 7, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    of_added, of_total = norm(1, rounds_added_first), norm(2, rounds_first)
    for first, second in ((None, of_total), (of_added, of_total), (of_added, None), (None, None)):
        total, normed = add_and_norm(hidden, added, first, second)
        expected = hidden + (added if first is None else first(added))
        torch.testing.assert_close(total, expected, rtol=ROUNDING[dtype], atol=1e-6 if first is None else 1e-2)
        wanted = total if second is None else second(total)
        torch.testing.assert_close(normed, wanted, rtol=ROUNDING[dtype], atol=1e-6)
    assert add_and_norm(hidden, None, None, None)[0] is hidden
