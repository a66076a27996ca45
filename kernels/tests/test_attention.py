"""Compiled attention agrees with the reference implementation, and a token's result has the same bits whatever else is
in the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numba
import pytest
import torch
from attention_checks import DTYPES, TREE, Attention, assert_as_alone, assert_right, features
from backends import on_each_device
from hypothesis import given, settings, strategies as st
from passes import Heads, Request, make_pass, passes

from specdec_core.contracts.draft import DEAD
from specdec_core.ops import REFERENCE
from specdec_kernels.cpu import OPS, amx

attention, reference = OPS["paged_attention"], REFERENCE["paged_attention"]


def without_amx(*args: Any, **features: Any) -> torch.Tensor:
    with mock.patch.object(amx, "serves", return_value=False):
        return attention(*args, **features)


WAYS = pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        *(pytest.param(dtype, attention, id=str(dtype)) for dtype in DTYPES),
        pytest.param(
            torch.bfloat16,
            without_amx,
            marks=pytest.mark.skipif(not amx.is_allowed(), reason="this CPU lacks AMX"),
            id="bfloat16 without AMX",
        ),
    ],
)


@WAYS
@settings(max_examples=25, deadline=None)
@given(data=st.data(), wanted=features())
def test_it_agrees_with_the_reference(dtype: torch.dtype, attention: Attention, data: Any, wanted: dict) -> None:
    assert_right(attention, data.draw(passes(dtype)), wanted)


@WAYS
@settings(max_examples=12, deadline=None)
@given(data=st.data(), wanted=features())
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(
    dtype: torch.dtype, attention: Attention, data: Any, wanted: dict
) -> None:
    block_size = data.draw(st.sampled_from([2, 16]))
    assert_as_alone(attention, data.draw(passes(dtype)), wanted, block_size, lambda number: [*range(number)])


@WAYS
def test_long_prefills_agree_with_the_reference(dtype: torch.dtype, attention: Attention) -> None:
    made = make_pass([Request(30, 100), Request(40, 1, TREE), Request(0, 65)], dtype=dtype, num_padding=5)
    found = attention(*made.features, 0.3)
    torch.testing.assert_close(found, reference(*made.features, 0.3), rtol=2**-7, atol=4e-3)


@WAYS
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [Heads(2, 2, 64, 64), Heads(1, 3, 32, 96), Heads(1, 20, 64, 48)], ids=str)
def test_whole_tiles_of_many_queries(
    heads: Heads, window: int | None, dtype: torch.dtype, attention: Attention
) -> None:
    made = make_pass([Request(30, 40), Request(300, 1, TREE), Request(77, 9)], heads, dtype=dtype)
    assert_right(attention, made, {"window": window})
    assert_as_alone(attention, made, {"window": window}, 16, lambda number: [0, 3, number - 1])


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


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "value"), [("window", 7), ("softcap", 0.5), ("sinks", torch.ones(4))])
def test_each_feature_matters(ops: dict, name: str, value: Any, dtype: torch.dtype) -> None:
    made = make_pass([Request(40, 1, TREE)], dtype=dtype)
    with_it, without = (ops["paged_attention"](*made.features, 0.3, **given) for given in ({name: value}, {}))
    is_alone = torch.arange(len(made.query)) == 1 + TREE.index(DEAD)  # a score among no others
    is_near = (with_it.float() - without.float()).abs().amax(dim=(1, 2)) < 1e-2
    assert torch.equal(is_near, is_alone if name != "sinks" else torch.zeros_like(is_alone))


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_finite_stays_with_its_request(ops: dict, where: str, poison: float, dtype: torch.dtype) -> None:
    made = make_pass([Request(40, 1, TREE), Request(50, 2), Request(10, 1, TREE)], dtype=dtype, num_padding=3)
    before = ops["paged_attention"](*made.features, 0.3)
    spoilt = made.rows(1)
    if where == "query":
        made.query[spoilt, 1, 3] = poison
    else:
        getattr(made, where)[made.slots(1, [17]), 0, 3] = poison
    after = ops["paged_attention"](*made.features, 0.3)
    assert not after[spoilt].isfinite().all() or (where == "keys" and poison != torch.nan)
    is_other = torch.ones(len(before), dtype=torch.bool)
    is_other[spoilt] = False
    assert torch.equal(after[is_other], before[is_other])


@on_each_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_on_its_branch(ops: dict, poison: float) -> None:
    made = make_pass([Request(40, 1, TREE)])
    before = ops["paged_attention"](*made.features, 0.3)
    made.keys[made.slots(0, [41]), :, 3] = made.values[made.slots(0, [41]), :, 3] = poison  # the first node
    after = ops["paged_attention"](*made.features, 0.3)
    below = [1, 3, 4, 7, 8]  # rows of the forward pass: the node and its descendants
    assert not after[below].isfinite().all(dim=(1, 2)).any()
    others = [0, 2, 5, 6]
    assert torch.equal(after[others], before[others])


@on_each_device
def test_mixed_types_are_left_to_the_reference_to_complain_of(ops: dict) -> None:
    made = make_pass([Request(40, 1, TREE)], num_padding=3)
    with pytest.raises(RuntimeError, match="dtype"):
        ops["paged_attention"](made.query.bfloat16(), made.keys, made.values, made.plan, 0.3)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_stored(ops: dict, dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 5, 7, dtype=dtype).transpose(0, 1), torch.randn(5, 2, 3, dtype=dtype)
    slots = torch.tensor([4, -1, 0, 9, 2])
    caches = [torch.zeros(11, 2, width, dtype=dtype) for width in (7, 3, 7, 3)]
    ops["store_kv"](*caches[:2], slots, key, value)
    REFERENCE["store_kv"](*caches[2:], slots, key, value)
    caches = [cache[:-1] for cache in caches]  # the last row is never read
    assert caches[0].any()
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@on_each_device
def test_numbers_of_another_type_are_not_stored(ops: dict) -> None:
    """Storing float32 keys and values in a bfloat16 cache raises an error, so no wrong bits are stored."""
    caches = [torch.zeros(11, 2, 7, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(RuntimeError, match="dtype"):
        ops["store_kv"](*caches, torch.tensor([1]), torch.ones(1, 2, 7), torch.ones(1, 2, 7))


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_a_fused_product_are_taken_as_they_lie(ops: dict, dtype: torch.dtype) -> None:
    made = make_pass([Request(200, 1, TREE), Request(10, 1)], dtype=dtype)
    wider = torch.full((len(made.query), 7, 16), torch.nan, dtype=dtype)
    wider[:, 2:6] = made.query
    assert torch.equal(
        ops["paged_attention"](wider[:, 2:6], made.keys, made.values, made.plan, 0.3),
        ops["paged_attention"](*made.features, 0.3),
    )
    slots, keys, values = made.slots(0, [7, 3]), made.keys.clone(), made.values.clone()
    ops["store_kv"](keys, values, slots, wider[:2, 2:4], wider[2:4, 4:6])
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
