"""The attention kernel for GPUs agrees with the reference in float64, and a token's result has the same bits whatever
else is in the forward pass. What it shares with the one for CPUs is tested in ../test_attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_checks import DTYPES, TREE, assert_as_alone, assert_right, computed, features
from hypothesis import given, settings, strategies as st
from passes import Heads, Request, make_pass, passes

from specdec_core.models import graph_memory
from specdec_kernels.gpu import OPS, attention as kernel

attention = OPS["paged_attention"]
ALL_APART, ALL_TOGETHER = 10**9, 0
"""FEW_PROGRAMS with which each part, or none, has a program of its own."""
MIXED = [Request(300, 1, TREE), Request(70, 20), Request(9, 1, (-1, 0, 1)), Request(50, 1)]
FEATURES = {"window": 100, "softcap": 2.0, "sinks": "some"}
with_and_without_features = pytest.mark.parametrize("wanted", [{}, FEATURES], ids=["plain", "features"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), wanted=features())
def test_it_agrees_with_the_reference(dtype: torch.dtype, data: Any, wanted: dict) -> None:
    assert_right(attention, data.draw(passes(dtype)), wanted)


@pytest.mark.parametrize("num_nodes", [1, 64, 65, 256])
def test_trees_of_any_size(num_nodes: int) -> None:
    tree = tuple((node - 1) // 2 if node else -1 for node in range(num_nodes))
    chain = tuple(range(-1, num_nodes - 1))
    assert_right(attention, make_pass([Request(100, 1, tree), Request(3, 1, chain), Request(0, 2)], Heads(1, 1)), {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 3, 16, 71])
def test_groups_of_heads(groups: int, dtype: torch.dtype) -> None:
    made = make_pass([Request(60, 1, TREE), Request(9, 4)], Heads(1, groups, 24, 40), dtype=dtype)
    assert_right(attention, made, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@with_and_without_features
def test_a_token_gets_the_bits_that_it_gets_when_decoded_alone(dtype: torch.dtype, wanted: dict) -> None:
    made = make_pass(MIXED, dtype=dtype, num_padding=2)
    assert_as_alone(attention, made, wanted, 2, lambda number: [0, number // 2, number - 1])


@with_and_without_features
def test_one_program_or_several_make_no_difference(monkeypatch: pytest.MonkeyPatch, wanted: dict) -> None:
    made = make_pass(MIXED, num_padding=2)
    monkeypatch.setattr(kernel, "PART", 64)
    found = []
    for few in (ALL_APART, ALL_TOGETHER):
        monkeypatch.setattr(kernel, "FEW_PROGRAMS", few)
        found.append(computed(attention, made, wanted))
    assert torch.equal(*found)


@pytest.mark.parametrize("slot", [11, 10**9, -12])
def test_nothing_is_written_where_there_is_no_slot(slot: int) -> None:
    caches = [torch.zeros(11, 2, 7) for _ in range(2)]
    OPS["store_kv"](*caches, torch.tensor([slot]), torch.ones(1, 2, 7), torch.ones(1, 2, 7))
    assert not any(cache.any() for cache in caches)


def test_the_memory_plan_counts_its_partial_results() -> None:
    assert (graph_memory.PART_KEYS, graph_memory.PARTIAL_BYTES) == (kernel.PART, kernel.MOST_PARTIAL_BYTES)
