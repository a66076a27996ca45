"""Attention in a CUDA graph: with fixed shapes and numbers that only the device knows, a token gets the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import TREE, features
from hypothesis import given, settings, strategies as st
from passes import CPU, Pass, Request, make_pass, passes

from specdec_core.models.graph_inputs import PlanInputs, PlanShape
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_kernels.gpu import OPS
from specdec_kernels.gpu.pass_layout import device_tiles_of, tiles_of

attention = OPS["paged_attention"]


def fixed_plan(made: Pass, num_more: int) -> AttentionPlan:
    """The plan as a graph has it, of num_more tokens, blocks and tree slots more than are needed."""
    plan = made.fresh_plan()
    seen, tables = plan.visibility, plan.metadata.block_tables
    num_paths = 0 if seen.more_slots is None else seen.more_slots.shape[1] + num_more
    shape = PlanShape(
        tables.shape[1] + num_more,
        plan.metadata.block_size,
        num_paths,
        seen.num_tree_slots + num_more if num_paths else 0,
    )
    inputs = PlanInputs.empty(max(len(seen.positions), len(tables)) + num_more, shape, CPU)
    for name in ("positions", "prefix_lens", "more_slots", "context_lens", "block_tables"):  # of another forward pass
        getattr(inputs, name).fill_(3)
    inputs.block_tables.zero_()
    inputs.read(plan)
    return inputs.plan(shape, plan)


def check(made: Pass, wanted: dict[str, Any], num_more: int) -> None:
    sinks = torch.linspace(-2, 3, made.query.shape[1]) if wanted.get("sinks") else None
    plan = fixed_plan(made, num_more)
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


@pytest.mark.parametrize("name", ["token_requests", "prefix_lens", "more_slots", "block_tables"])
def test_a_buffer_that_is_not_read_anew_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read = PlanInputs.read

    def forgetting(inputs: PlanInputs, *given: Any) -> None:
        before = getattr(inputs, name).clone()
        read(inputs, *given)
        getattr(inputs, name).copy_(before)

    check(make_pass(MIXED), {}, 1)
    monkeypatch.setattr(PlanInputs, "read", forgetting)
    with pytest.raises((AssertionError, RuntimeError)):  # or of an index that is out of bounds
        check(make_pass(MIXED), {}, 1)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), size=st.integers(1, 17), num_more=st.integers(0, 5)
)
def test_tiles_of_the_device_are_those_of_the_host(lengths: list[int], size: int, num_more: int) -> None:
    owners = np.concatenate([np.arange(len(lengths)).repeat(lengths), np.full(num_more, -1)]).astype(np.int32)
    if len(owners):
        tiles = device_tiles_of(torch.from_numpy(owners), size)
        assert tiles.dtype == torch.int32
        assert torch.equal(tiles[tiles[:, 2] > 0], torch.from_numpy(tiles_of(tuple(lengths), size)))
