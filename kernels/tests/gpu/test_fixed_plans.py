"""Attention in a CUDA graph: with fixed shapes and numbers that only the device knows, a token gets the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import TREE, features
from hypothesis import given, settings, strategies as st
from passes import CPU, Pass, Request, make_pass, passes

from specdec_core.models import graph_memory
from specdec_core.models.graph_buffers import Buffers, Copies
from specdec_core.models.graph_inputs import PlanInputs, PlanShape
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_kernels.gpu import OPS
from specdec_kernels.gpu.attention import MOST_PARTIAL_BYTES, PART
from specdec_kernels.gpu.pass_layout import device_tiles_of, tiles_of

attention = OPS["paged_attention"]


def fixed_plan(made: Pass, num_more: int, forgotten: str | None) -> AttentionPlan:
    """The plan as a graph has it, of num_more tokens, blocks and tree slots more than are needed. forgotten: the input
    that keeps what it was for another forward pass."""
    plan = made.fresh_plan()
    seen, tables = plan.visibility, plan.metadata.block_tables
    num_paths = 0 if seen.more_slots is None else seen.more_slots.shape[1] + num_more
    shape = PlanShape(
        tables.shape[1] + num_more,
        plan.metadata.block_size,
        num_paths,
        seen.num_tree_slots + num_more if num_paths else 0,
    )
    num_tokens, copies = max(len(seen.positions), len(tables)) + num_more, Copies()
    inputs = PlanInputs.of(Buffers(), num_tokens, shape, CPU)
    for name in ("positions", "prefix_lens", "more_slots", "requests"):  # of another forward pass
        buffer = getattr(inputs, name)
        buffer.rows[:num_tokens] = 3 if name != "requests" else 0
        buffer.num_filled = num_tokens
    before = None if forgotten is None else getattr(inputs, forgotten).rows.clone()
    inputs.read(plan, copies)
    copies.run()
    if forgotten is not None:
        getattr(inputs, forgotten).rows.copy_(before)
    return inputs.plan(shape, plan)


def check(made: Pass, wanted: dict[str, Any], num_more: int, forgotten: str | None = None) -> None:
    sinks = torch.linspace(-2, 3, made.query.shape[1]) if wanted.get("sinks") else None
    plan = fixed_plan(made, num_more, forgotten)
    missing = len(plan.visibility.positions) - len(made.query)
    query = torch.nn.functional.pad(made.query, (0, 0, 0, 0, 0, missing))
    options = wanted | {"sinks": sinks}
    found = attention(query, made.keys, made.values, plan, 0.3, **options)
    expected = attention(made.query, made.keys, made.values, made.fresh_plan(), 0.3, **options)
    assert torch.equal(found[: len(made.query)], expected)
    assert bool(found.isfinite().all())


@settings(max_examples=5, deadline=None)
@given(made=passes(), wanted=features(), num_more=st.integers(0, 9))
def test_each_token_gets_the_same_bits(made: Pass, wanted: dict[str, Any], num_more: int) -> None:
    check(made, wanted, num_more)


MIXED = [Request(300, 1, TREE), Request(70, 20), Request(9, 1, (-1, 0, 1)), Request(50, 1)]


@pytest.mark.parametrize("name", ["requests", "prefix_lens", "more_slots", "block_tables"])
def test_a_buffer_that_is_not_read_anew_is_noticed(name: str) -> None:
    check(make_pass(MIXED), {}, 1)
    with pytest.raises((AssertionError, RuntimeError)):  # or of an index that is out of bounds
        check(make_pass(MIXED), {}, 1, name)


def test_tables_that_are_far_wider_give_the_same_bits() -> None:
    check(make_pass(MIXED), {}, 100)


def test_memory_is_planned_for_partial_results() -> None:
    assert (PART, MOST_PARTIAL_BYTES) == (graph_memory.PART_KEYS, graph_memory.PARTIAL_BYTES)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), size=st.integers(1, 17), num_more=st.integers(0, 5)
)
def test_tiles_of_the_device_are_those_of_the_host(lengths: list[int], size: int, num_more: int) -> None:
    owners = np.concatenate([np.arange(len(lengths)).repeat(lengths), np.full(num_more, -1)]).astype(np.int32)
    if len(owners):
        tiles = device_tiles_of(torch.from_numpy(owners), size)
        assert tiles.dtype == torch.int32
        assert torch.equal(tiles[tiles[:, 2] > 0], torch.from_numpy(tiles_of(tuple(lengths), size)))
