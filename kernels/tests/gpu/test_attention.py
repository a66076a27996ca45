"""The attention kernel agrees with the reference in float64, and a token's result has the same bits whatever else is in
the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from passes import Heads, Pass, Request, make_pass, passes

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS, attention as kernel

attention, reference = OPS["paged_attention"], REFERENCE["paged_attention"]
DTYPES = [torch.float32, torch.bfloat16]
TREE = (-1, -1, 0, 0, DEAD, 1, 2, 2)
ALL_APART, ALL_TOGETHER = 10**9, 0
"""FEW_PROGRAMS with which each part, or none, has a program of its own."""


@st.composite
def features(draw: Any) -> dict[str, Any]:
    return {
        "window": draw(st.none() | st.integers(1, 120)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 2, 30.0])),
        "sinks": draw(st.none() | st.just("some")),
    }


def with_sinks(features: dict[str, Any], made: Pass) -> dict[str, Any]:
    num_heads = made.query.shape[1]
    return features | {"sinks": torch.linspace(-2, 3, num_heads) if features["sinks"] else None}


def computed(made: Pass, **features: Any) -> torch.Tensor:
    return attention(made.query, made.keys, made.values, made.fresh_plan(), 0.3, **features)


def heads_of(made: Pass) -> Heads:
    num_kv_heads, key_dim = made.keys.shape[1:]
    return Heads(num_kv_heads, made.query.shape[1] // num_kv_heads, key_dim, made.values.shape[2])


def assert_right(made: Pass, wanted: dict[str, Any]) -> None:
    found = computed(made, **wanted)

    def exact(values: torch.Tensor) -> torch.Tensor:
        return reference(made.query.double(), made.keys.double(), values, made.fresh_plan(), 0.3, **wanted)

    expected, mean_size = exact(made.values.double()), exact(made.values.double().abs())
    rounding = 2**-8 if made.query.dtype == torch.bfloat16 else 2e-6  # of each weight, and of the result
    error, most = (found - expected).abs(), rounding * (mean_size + expected.abs()) * 1.01 + 4e-6
    n = sum(made.plan.metadata.lengths)
    assert found.dtype == made.query.dtype
    assert (error[:n] <= most[:n]).all(), (error[:n] / most[:n]).max()
    assert not found[n:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), wanted=features())
def test_it_agrees_with_the_reference(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    made = data.draw(passes(dtype))
    assert_right(made, with_sinks(wanted, made))


@pytest.mark.parametrize("num_nodes", [1, 64, 65, 256])
def test_trees_of_any_size(num_nodes: int) -> None:
    tree = tuple((node - 1) // 2 if node else -1 for node in range(num_nodes))
    chain = tuple(range(-1, num_nodes - 1))
    made = make_pass([Request(100, 1, tree), Request(3, 1, chain), Request(0, 2)], Heads(1, 1))
    assert_right(made, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 3, 16, 71])
def test_groups_of_heads(groups: int, dtype: torch.dtype) -> None:
    made = make_pass([Request(60, 1, TREE), Request(9, 4)], Heads(1, groups, 24, 40), dtype=dtype)
    assert_right(made, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4, deadline=None)
@given(data=st.data(), wanted=features())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    made = data.draw(passes(dtype))
    wanted = with_sinks(wanted, made)
    together = computed(made, **wanted)
    block_size = data.draw(st.sampled_from([2, 16]))
    for b, request in enumerate(made.requests):
        rows = range(*made.rows(b).indices(len(made.query)))
        for token in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=3)) if rows else ():
            path = request.path(token)
            alone = make_pass([Request(len(path) - 1, 1)], heads_of(made), block_size, dtype, seed=token)
            places = alone.slots(0, list(range(len(path))))
            alone.keys[places], alone.values[places] = (c[made.slots(b, path)] for c in (made.keys, made.values))
            query = made.query[rows[token]].unsqueeze(0)
            found = attention(query, alone.keys, alone.values, alone.plan, 0.3, **wanted)
            assert torch.equal(found[0], together[rows[token]]), (request, token)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4, deadline=None)
@given(data=st.data(), wanted=features())
def test_one_program_or_several_make_no_difference(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    made = data.draw(passes(dtype))
    wanted = with_sinks(wanted, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "PART", 64)
        found = []
        for few in (ALL_APART, ALL_TOGETHER):
            patch.setattr(kernel, "FEW_PROGRAMS", few)
            found.append(computed(made, **wanted))
    assert torch.equal(*found)


@pytest.mark.parametrize(("name", "value"), [("window", 7), ("softcap", 0.5), ("sinks", torch.ones(4))])
def test_each_feature_matters(name: str, value: Any) -> None:
    made = make_pass([Request(40, 1, TREE)])
    with_it, without = computed(made, **{name: value}), computed(made)
    is_alone = torch.arange(len(made.query)) == 1 + TREE.index(DEAD)  # a score among no others
    is_near = (with_it - without).abs().amax(dim=(1, 2)) < 1e-2
    assert torch.equal(is_near, is_alone if name != "sinks" else torch.zeros_like(is_alone))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_finite_stays_with_its_request(where: str, poison: float) -> None:
    made = make_pass([Request(40, 1, TREE), Request(50, 2), Request(10, 1, TREE)], num_padding=3)
    before = computed(made)
    spoilt = made.rows(1)
    if where == "query":
        made.query[spoilt, 1, 3] = poison
    else:
        getattr(made, where)[made.slots(1, [17]), 0, 3] = poison
    after = computed(made)
    assert not after[spoilt].isfinite().all() or (where == "keys" and poison != torch.nan)
    is_other = torch.ones(len(before), dtype=torch.bool)
    is_other[spoilt] = False
    assert torch.equal(after[is_other], before[is_other])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_on_its_branch(poison: float) -> None:
    made = make_pass([Request(40, 1, TREE)])
    before = computed(made)
    made.keys[made.slots(0, [41]), :, 3] = made.values[made.slots(0, [41]), :, 3] = poison  # the first node
    after = computed(made)
    below = [1, 3, 4, 7, 8]  # rows of the forward pass: the node and its descendants
    assert not after[below].isfinite().all(dim=(1, 2)).any()
    others = [0, 2, 5, 6]
    assert torch.equal(after[others], before[others])


def test_mixed_types_are_refused() -> None:
    made = make_pass([Request(40, 1, TREE)], num_padding=3)
    with pytest.raises(RuntimeError, match="dtypes"):
        attention(made.query.bfloat16(), made.keys, made.values, made.plan, 0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_a_fused_product_are_taken_as_they_lie(dtype: torch.dtype) -> None:
    made = make_pass([Request(200, 1, TREE), Request(10, 1)], dtype=dtype)
    wider = torch.full((len(made.query), 7, 16), torch.nan, dtype=dtype)
    wider[:, 2:6] = made.query
    assert torch.equal(attention(wider[:, 2:6], made.keys, made.values, made.plan, 0.3), computed(made))
    slots, keys, values = made.slots(0, [7, 3]), made.keys.clone(), made.values.clone()
    OPS["store_kv"](keys, values, slots, wider[:2, 2:4], wider[2:4, 4:6])
    assert torch.equal(keys[slots], made.query[:2, :2])
    assert torch.equal(values[slots], made.query[2:4, 2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_stored(dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 5, 7, dtype=dtype).transpose(0, 1), torch.randn(5, 2, 3, dtype=dtype)
    slots = torch.tensor([4, -1, 0, 9, 2])
    found = [torch.zeros(11, 2, width, dtype=dtype) for width in (7, 3)]
    expected = [each.clone() for each in found]
    OPS["store_kv"](*found, slots, key, value)
    REFERENCE["store_kv"](*expected, slots, key, value)
    for one, other in zip(found, expected, strict=True):
        assert one.any()
        assert torch.equal(one[:-1], other[:-1]), "the last row is never read"


@pytest.mark.parametrize("slot", [11, 10**9, -12])
def test_nothing_is_written_where_there_is_no_slot(slot: int) -> None:
    caches = [torch.zeros(11, 2, 7) for _ in range(2)]
    OPS["store_kv"](*caches, torch.tensor([slot]), torch.ones(1, 2, 7), torch.ones(1, 2, 7))
    assert not any(cache.any() for cache in caches)


def test_numbers_of_another_type_are_not_stored() -> None:
    caches = [torch.zeros(11, 2, 7, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(RuntimeError, match="dtype"):
        OPS["store_kv"](*caches, torch.tensor([1]), torch.ones(1, 2, 7), torch.ones(1, 2, 7))
