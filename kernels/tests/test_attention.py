"""Compiled attention agrees with the reference implementation, and a token's result has the same bits whatever else is
in the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import pytest
import torch
from hypothesis import given, settings, strategies as st
from passes import Heads, Pass, Request, make_pass, passes

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE
from specdec_kernels.cpu import OPS

attention, reference = OPS["paged_attention"], REFERENCE["paged_attention"]
DTYPES = [torch.float32, torch.bfloat16]
TREE = (-1, -1, 0, 0, DEAD, 1, 2, 2)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), wanted=features())
def test_it_agrees_with_the_reference(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    made = data.draw(passes(dtype))
    wanted = with_sinks(wanted, made)
    found = attention(*made.features, 0.3, **wanted)

    def computed(values: torch.Tensor) -> torch.Tensor:
        return reference(made.query.double(), made.keys.double(), values, made.fresh_plan(), 0.3, **wanted)

    exact, mean_size = computed(made.values.double()), computed(made.values.double().abs())
    assert found.dtype == dtype
    n = sum(made.plan.metadata.lengths)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6  # of each weight, and of the result
    error, most = (found - exact).abs(), rounding * (mean_size + exact.abs()) * 1.01 + 3e-6
    assert (error[:n] <= most[:n]).all(), (error[:n] / most[:n]).max()
    assert not found[n:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), wanted=features())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    made = data.draw(passes(dtype))
    wanted = with_sinks(wanted, made)
    together = attention(*made.features, 0.3, **wanted)
    block_size = data.draw(st.sampled_from([2, 16]))
    for b, request in enumerate(made.requests):
        for token, row in enumerate(range(*made.rows(b).indices(len(made.query)))):
            path = request.path(token)
            alone = make_pass([Request(len(path) - 1, 1)], heads_of(made), block_size, dtype, seed=row)
            places = alone.slots(0, list(range(len(path))))
            alone.keys[places], alone.values[places] = (c[made.slots(b, path)] for c in (made.keys, made.values))
            found = attention(made.query[row : row + 1], alone.keys, alone.values, alone.plan, 0.3, **wanted)
            assert torch.equal(found[0], together[row]), (request, token)


def heads_of(made: Pass) -> Heads:
    num_kv_heads, key_dim = made.keys.shape[1:]
    return Heads(num_kv_heads, made.query.shape[1] // num_kv_heads, key_dim, made.values.shape[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_prefills_agree_with_the_reference(dtype: torch.dtype) -> None:
    made = make_pass([Request(30, 100), Request(40, 1, TREE), Request(0, 65)], dtype=dtype, num_padding=5)
    found = attention(*made.features, 0.3)
    torch.testing.assert_close(found, reference(*made.features, 0.3), rtol=2**-7, atol=4e-3)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16], ids=str)
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread here")
    made = make_pass([Request(200, 1, TREE), Request(90, 20)], Heads(4, 3, 24, 40), dtype=dtype)
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(attention(made.query, made.keys, made.values, made.fresh_plan(), 0.3))
        assert torch.get_num_threads() == num_threads
    assert numba.get_num_threads() == num_threads
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "value"), [("window", 7), ("softcap", 0.5), ("sinks", torch.ones(4))])
def test_each_feature_matters(name: str, value: Any, dtype: torch.dtype) -> None:
    made = make_pass([Request(40, 1, TREE)], dtype=dtype)
    with_it, without = (attention(*made.features, 0.3, **given) for given in ({name: value}, {}))
    is_alone = torch.arange(len(made.query)) == 1 + TREE.index(DEAD)  # a score among no others
    is_near = (with_it.float() - without.float()).abs().amax(dim=(1, 2)) < 1e-2
    assert torch.equal(is_near, is_alone if name != "sinks" else torch.zeros_like(is_alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_finite_stays_with_its_request(where: str, poison: float, dtype: torch.dtype) -> None:
    made = make_pass([Request(40, 1, TREE), Request(50, 2), Request(10, 1, TREE)], dtype=dtype, num_padding=3)
    before = attention(*made.features, 0.3)
    spoilt = made.rows(1)
    if where == "query":
        made.query[spoilt, 1, 3] = poison
    else:
        getattr(made, where)[made.slots(1, [17]), 0, 3] = poison
    after = attention(*made.features, 0.3)
    assert not after[spoilt].isfinite().all() or (where == "keys" and poison != torch.nan)
    is_other = torch.ones(len(before), dtype=torch.bool)
    is_other[spoilt] = False
    assert torch.equal(after[is_other], before[is_other])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_on_its_branch(poison: float) -> None:
    made = make_pass([Request(40, 1, TREE)])
    before = attention(*made.features, 0.3)
    made.keys[made.slots(0, [41]), :, 3] = made.values[made.slots(0, [41]), :, 3] = poison  # the first node
    after = attention(*made.features, 0.3)
    below = [1, 3, 4, 7, 8]  # rows of the forward pass: the node and its descendants
    assert not after[below].isfinite().all(dim=(1, 2)).any()
    others = [0, 2, 5, 6]
    assert torch.equal(after[others], before[others])


def test_mixed_types_are_left_to_the_reference_to_complain_of() -> None:
    made = make_pass([Request(40, 1, TREE)], num_padding=3)
    with pytest.raises(RuntimeError, match="dtype"):
        attention(made.query.bfloat16(), made.keys, made.values, made.plan, 0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_stored(dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 5, 7, dtype=dtype).transpose(0, 1), torch.randn(5, 2, 3, dtype=dtype)
    slots = torch.tensor([4, -1, 0, 9, 2])
    caches = [torch.zeros(11, 2, width, dtype=dtype) for width in (7, 3, 7, 3)]
    OPS["store_kv"](*caches[:2], slots, key, value)
    REFERENCE["store_kv"](*caches[2:], slots, key, value)
    assert caches[0].any()
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_numbers_of_another_type_are_not_stored() -> None:
    """Storing float32 keys and values in a bfloat16 cache raises an error, so no wrong bits are stored."""
    caches = [torch.zeros(11, 2, 7, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(RuntimeError, match="dtype"):
        OPS["store_kv"](*caches, torch.tensor([1]), torch.ones(1, 2, 7), torch.ones(1, 2, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_a_fused_product_are_taken_as_they_lie(dtype: torch.dtype) -> None:
    made = make_pass([Request(200, 1, TREE), Request(10, 1)], dtype=dtype)
    wider = torch.full((len(made.query), 7, 16), torch.nan, dtype=dtype)
    wider[:, 2:6] = made.query
    assert torch.equal(attention(wider[:, 2:6], made.keys, made.values, made.plan, 0.3), attention(*made.features, 0.3))
    slots, keys, values = made.slots(0, [7, 3]), made.keys.clone(), made.values.clone()
    OPS["store_kv"](keys, values, slots, wider[:2, 2:4], wider[2:4, 4:6])
    assert torch.equal(keys[slots], made.query[:2, :2])
    assert torch.equal(values[slots], made.query[2:4, 2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stride_of_a_single_token_does_not_matter(dtype: torch.dtype) -> None:
    made = make_pass([Request(20, 1)], dtype=dtype)
    num_heads, dim = made.query.shape[1:]
    strange = made.query.as_strided((1, num_heads, dim), (dim, dim, 1))
    expected = attention(*made.features, 0.3)
    assert torch.equal(attention(strange, made.keys, made.values, made.fresh_plan(), 0.3), expected)


@pytest.mark.parametrize("slot", [11, -12])
def test_nothing_is_written_where_there_is_no_slot(slot: int) -> None:
    caches, given = [torch.zeros(11, 2, 7) for _ in range(2)], torch.ones(2, 2, 7)
    with pytest.raises(IndexError):
        OPS["store_kv"](*caches, torch.tensor([1, slot]), given, given)
