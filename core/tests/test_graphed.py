"""Functions of draft heads run as CUDA graphs on a pretend GPU: they return the same, and store the same keys."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_graphs import CHAINS, TREES, inputs_of

from specdec_core.errors import SpecdecError
from specdec_core.models.attention import PagedAttention
from specdec_core.models.graphed import GraphedFunction
from specdec_core.ops import REFERENCE
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding
from specdec_testing.pretend_cuda import CUDA, PretendCuda

WIDTH = 2


def attended(query: Any, keys: Any, values: Any, plan: AttentionPlan, *more: Any, **features: Any) -> Any:
    """Depends on the mask, and on the window."""
    seen = plan.prefix_lens + plan.ancestors.sum(1) + (features["window"] or 0)
    return query + seen[:, None, None]


class Head:
    """A head of one layer, with a KV cache of its own. num_calls: of its Python."""

    def __init__(self) -> None:
        self.caches = torch.zeros(1000, 1, WIDTH, device=CUDA), torch.zeros(1000, 1, WIDTH, device=CUDA)
        ops: dict[str, Callable[..., Any]] = {"paged_attention": attended, "store_kv": REFERENCE["store_kv"]}
        kv: Any = SimpleNamespace(cache=lambda group, layer: self.caches)
        self.attention = PagedAttention(kv, [(0, 0)], ops, Padding(rows=1, keys=64))
        self.num_calls = 0

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, ...]:
        self.num_calls += 1
        heads = hidden.unsqueeze(1)
        found = self.attention.attend(0, heads, heads + 1, heads + positions[:, None, None])
        return found.squeeze(1) * depth, positions + depth


def inputs(seed: int) -> tuple[torch.Tensor, AttentionPlan]:
    token_ids, plan, _ = inputs_of(TREES if seed % 2 else CHAINS, seed)
    return token_ids[:, None] * torch.arange(1.0, 1 + WIDTH, device=CUDA), plan


def called(function: Any, head: Head, hidden: torch.Tensor, plan: AttentionPlan, depth: int, window: int | None) -> Any:
    with head.attention.forwarding(plan.metadata, plan.visibility, window=window):
        found = function(hidden, plan.visibility.positions, depth=depth)
        assert head.attention.plan is not None
        assert not head.attention.plan.is_fixed  # also after a capture
    return [each.cpu().tolist() for each in found]


def test_a_head_returns_and_stores_the_same() -> None:
    with PretendCuda():
        plain, head = Head(), Head()
        function = GraphedFunction(head.run, head.attention, "a head")
        for seed in range(20):
            depth, window = 1 + seed // 2 % 2, None
            hidden, plan = inputs(seed)
            expected = called(plain.run, plain, hidden, plan, depth, window)
            assert called(function, head, hidden, plan, depth, window) == expected
            for cache, others in zip(head.caches, plain.caches, strict=True):
                assert torch.equal(cache[:-1].cpu(), others[:-1].cpu())  # padding goes to the last slot
        assert function.graphs.num_replayed == 20 - 4 * 3
        assert head.num_calls < plain.num_calls + 4 * 2


def test_windows_have_graphs_of_their_own() -> None:
    with PretendCuda():
        plain, head = Head(), Head()
        function = GraphedFunction(head.run, head.attention, "a head")
        for i, window in enumerate([None, 3, 5] * 5):
            hidden, plan = inputs(2 * (i // 3))
            expected = called(plain.run, plain, hidden, plan, 1, window)
            assert called(function, head, hidden, plan, 1, window) == expected
        assert function.graphs.num_replayed == 3 * 2


def test_a_function_that_returns_no_tuple_is_refused() -> None:
    with PretendCuda(), pytest.raises(TypeError, match="returned OnCuda: return a tuple of tensors"):
        GraphedFunction(lambda given: given, None, "a head")(torch.ones(2, device=CUDA))


def test_an_interrupted_forward_pass_leaves_no_plan() -> None:
    with PretendCuda():
        head = Head()
        _, plan = inputs(0)
        attention, of_graph = head.attention, head.attention.plan_of(plan.metadata, plan.visibility)
        around = attention.forwarding(plan.metadata, plan.visibility)
        with pytest.raises(KeyboardInterrupt), around, attention.replacing(of_graph):
            raise KeyboardInterrupt
        assert head.attention.plan is None
        with pytest.raises(SpecdecError, match="outside of"):
            head.run(torch.zeros(1, WIDTH, device=CUDA), torch.zeros(1, device=CUDA), depth=1)
