"""Forward passes of any shape give the same results as CUDA graphs, on a pretend GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import fields
from hypothesis import given, settings, strategies as st

from specdec_core import Draft
from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import KVMetadata
from specdec_core.engine.step_batch import StepBatch
from specdec_core.engine.warm_up import until_replayed
from specdec_core.models import graphs as module
from specdec_core.models.graph_buffers import Buffer
from specdec_core.models.graph_inputs import Call, Inputs, PlanInputs, Tensors
from specdec_core.models.graphed import ForwardGraphs, Result
from specdec_core.models.graphs import Graphs
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding, padded_to
from specdec_core.ops.upload import upload
from specdec_testing.pretend_cuda import CUDA, PretendCuda

Requests = list[tuple[int, int, tuple[int, ...]]]
"""The number of computed tokens, of known tokens, and the parents of the draft's nodes of each request."""


@st.composite
def passes(draw: st.DrawFn) -> Requests:
    has_trees = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(0, 5))
        parents = tuple(draw(st.integers(-1, i - 1)) if has_trees else i - 1 for i in range(size))
        found.append((draw(st.integers(0, 40)), draw(st.sampled_from([1, 1, 1, 3])), parents))
    return found


def inputs_of(requests: Requests, seed: int) -> tuple[torch.Tensor, AttentionPlan, torch.Tensor]:
    """Token ids, plan and rows of a forward pass on the pretend device."""
    rng = np.random.default_rng(seed)
    trees = [DraftTree(rng.integers(0, 50, len(parents)).tolist(), list(parents)) for *_, parents in requests]
    is_chain = all(tree.parents == [*range(-1, len(tree.parents) - 1)] for tree in trees)
    draft = Draft.from_chains([t.token_ids for t in trees], CUDA) if is_chain else Draft.from_trees(trees, CUDA)
    schedule: Any = SimpleNamespace(
        requests=[
            SimpleNamespace(num_computed=start, token_ids=rng.integers(0, 50, start + known))
            for start, known, _ in requests
        ],
        num_known=[known for _, known, _ in requests],
        num_prefill_tokens=1,
    )
    num_tokens = sum(known + len(parents) for _, known, parents in requests)
    batch = StepBatch.of(schedule, draft, num_tokens, CUDA)
    longest = max(start + known + len(parents) for start, known, parents in requests)
    tables = rng.integers(1, 99, (len(requests), -(-longest // 16) + int(rng.integers(0, 5))))
    slots = rng.integers(0, 999, num_tokens)
    metadata = KVMetadata(tuple(batch.starts), batch.lengths, upload(tables, CUDA), upload(slots, CUDA), 16)
    return batch.token_ids, AttentionPlan(metadata, batch.visibility, Padding(rows=1, keys=64)), batch.rows


def run(
    token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: AttentionPlan, window: int | None
) -> Result:
    """A model whose results depend on all that attention may read."""
    owners = plan.token_requests.clamp(min=0).long()
    slots = padded_to(len(positions), plan.metadata.slot_mapping, value=-1)
    numbers = [
        token_ids,
        positions,
        plan.visibility.positions,
        slots,
        plan.prefix_lens,
        plan.context_lens[owners],
        plan.tree_start[owners],
    ]
    own = torch.arange(plan.block_tables.shape[1], device=CUDA) < (plan.context_lens[owners].unsqueeze(1) + 15) // 16
    numbers += [plan.ancestors.sum(1), (plan.block_tables[owners] * own).sum(1), plan.token_requests]
    hidden = torch.stack([number.double() for number in numbers], dim=1)
    return hidden[rows], {"final": hidden}


def forward(graphs: ForwardGraphs, given: tuple[torch.Tensor, AttentionPlan, torch.Tensor]) -> Result:
    token_ids, plan, rows = given
    return graphs.forward(token_ids, plan.visibility.positions, plan, rows, None)


def assert_equal(found: Result, expected: Result) -> None:
    assert torch.equal(found[0].cpu(), expected[0].cpu())
    assert torch.equal(found[1]["final"].cpu(), expected[1]["final"].cpu())


def check(passes: list[Requests]) -> Graphs:
    """Run forward passes, each as if it were run alone. The host waits for the device after each."""
    with PretendCuda():
        graphs = ForwardGraphs(run)
        for seed, requests in enumerate(passes):
            token_ids, plan, rows = inputs_of(requests, seed)
            expected = run(token_ids, plan.visibility.positions, rows, plan, None)
            assert_equal(graphs.forward(token_ids, plan.visibility.positions, plan, rows, None), expected)
        return graphs.graphs


@settings(max_examples=60, deadline=None)
@given(some=st.lists(passes(), min_size=1, max_size=3), number=st.integers(2, 6))
def test_results_are_those_of_the_usual_pass(some: list[Requests], number: int) -> None:
    graphs = check(some * number)
    assert not graphs.is_off
    assert graphs.num_calls == len(some) * number


CHAINS: Requests = [(9, 1, (-1, 0, 1)), (20, 1, ()), (3, 3, (-1,))]
TREES: Requests = [(9, 1, (-1, -1, 0, 2)), (20, 1, (-1, -1)), (3, 1, ())]


def test_a_graph_is_used_once_it_was_right() -> None:
    graphs = check([CHAINS] * 9 + [TREES] * 9)
    assert graphs.num_replayed == 2 * (9 - 1 - module.NUM_CHECKS)


TENSORS = ("token_ids", "positions", "rows")


def buffer_of(inputs: Inputs, name: str) -> torch.Tensor:
    if name in TENSORS:
        return inputs.buffers[TENSORS.index(name)].rows
    buffer: Buffer = getattr(inputs.plan, name.removeprefix("plan."))
    return buffer.rows


@pytest.mark.parametrize(
    "name", [*TENSORS, *(f"plan.{field.name}" for field in fields(PlanInputs) if field.type == "Buffer")]
)
def test_a_buffer_that_is_not_read_anew_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read = Inputs.read

    def stale(inputs: Inputs, *given: Any) -> None:
        before = buffer_of(inputs, name).clone()
        read(inputs, *given)
        buffer_of(inputs, name).copy_(before)

    monkeypatch.setattr(module, "NUM_CHECKS", 0)
    passes = [TREES, [*reversed(TREES)], TREES]
    assert check(passes).num_replayed == 2
    monkeypatch.setattr(Inputs, "read", stale)
    with pytest.raises(AssertionError):
        assert check(passes).num_replayed == 2


WIDE: Requests = [(9, 1, (-1, -1, -1, -1))]
DEEP: Requests = [(9, 1, (-1, -1, 0, 2))]
MANY: Requests = [(9, 1, (-1,) * 70)]
FEW: Requests = [(9, 30, (-1,) * 50)]


@pytest.mark.parametrize("both", [(WIDE, DEEP), (MANY, FEW)], ids=["num_paths", "num_tree_slots"])
def test_trees_of_another_shape_have_another_graph(monkeypatch: pytest.MonkeyPatch, both: Any) -> None:
    monkeypatch.setattr(module, "NUM_CHECKS", 0)
    for passes in (both, both[::-1]):
        with PretendCuda():
            given = [inputs_of(requests, 1) for requests in passes]
            graphs = ForwardGraphs(run)
            for each in given * 2:
                token_ids, plan, rows = each
                assert_equal(forward(graphs, each), run(token_ids, plan.visibility.positions, rows, plan, None))
        assert (graphs.graphs.num_replayed, len(graphs.graphs._graphs)) == (2, 2)


def test_large_passes_and_many_rows_are_not_captured() -> None:
    assert not check([[(0, 300, ())]] * 5)._graphs
    with PretendCuda():
        graphs = ForwardGraphs(run)
        token_ids, plan, rows = inputs_of(CHAINS, 0)
        for _ in range(5):
            graphs.forward(token_ids, plan.visibility.positions, plan, torch.cat([rows] * 4), None)
    assert not graphs.graphs._graphs


def test_results_outlive_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_CHECKS", 0)
    with PretendCuda():
        graphs = ForwardGraphs(run)
        given = [inputs_of(CHAINS, seed) for seed in range(3)]
        found = [forward(graphs, each) for each in given]
        assert graphs.graphs.num_replayed == 2
        for (token_ids, plan, rows), each in zip(given, found, strict=True):
            assert_equal(each, run(token_ids, plan.visibility.positions, rows, plan, None))


def test_a_pass_that_waits_for_the_device_is_not_captured() -> None:
    def waiting(token_ids: Any, positions: Any, rows: Any, plan: AttentionPlan, window: Any) -> Result:
        assert int(token_ids.max()) < 99
        return run(token_ids, positions, rows, plan, window)

    with PretendCuda():
        graphs = ForwardGraphs(waiting)
        for _ in range(5):
            forward(graphs, inputs_of(CHAINS, 0))[0].cpu()
        assert (graphs.graphs.is_off, graphs.graphs.num_replayed) == (True, 0)


def test_what_the_host_computed_is_noticed() -> None:
    number = 0

    def counting(token_ids: Any, positions: Any, rows: Any, plan: AttentionPlan, window: Any) -> Result:
        nonlocal number
        number += 1
        logits, features = run(token_ids, positions, rows, plan, window)
        return logits + number, features

    with PretendCuda():
        graphs = ForwardGraphs(counting)
        for seed in range(5):
            forward(graphs, inputs_of(CHAINS, seed))[0].cpu()
        assert (graphs.graphs.is_off, graphs.graphs.num_replayed) == (True, 0)


def test_the_usual_call_overwrites_what_a_wrong_graph_wrote() -> None:
    """The host's number is wrong in a graph, also in what it leaves in a cache."""
    number = 0

    def writing(call: Call) -> Tensors:
        nonlocal number
        number += 1
        cache.copy_(call.tensors[0].sum() + number)
        return (call.tensors[0] + number,)

    with PretendCuda():
        cache = torch.zeros((), device=CUDA)
        graphs = Graphs(writing, "a function")
        for value in range(5):
            (result,) = graphs(Call((torch.full((1,), float(value), device=CUDA),)))
            assert (cache.item(), result.item()) == (value + number, value + number)
        assert graphs.is_off


def test_checks_do_not_wait_for_the_device() -> None:
    with PretendCuda() as pretend:
        graphs = Graphs(lambda call: (call.tensors[0] + 1,), "a function")
        for number in range(9):
            given = torch.full((3,), float(number), device=CUDA)
            graphs(Call((given,)))
        assert (graphs.num_replayed, pretend.waits) == (0, [])  # the device may have computed nothing
        given.cpu()
        graphs(Call((given,)))
        assert (graphs.num_replayed, len(pretend.waits)) == (1, 1)


def test_graphs_of_narrower_block_tables_are_dropped() -> None:
    with PretendCuda():
        graphs = ForwardGraphs(run)
        for requests in (CHAINS, TREES):
            forward(graphs, inputs_of(requests, 0))
        assert len(graphs.graphs._graphs) == 2
        forward(graphs, inputs_of([(700, 1, ())], 0))
        (shape,) = graphs.graphs._graphs
        assert shape.plan is not None
        assert shape.plan.max_blocks == 64
        forward(graphs, inputs_of(CHAINS, 0))
        assert [shape.plan.max_blocks for shape in graphs.graphs._graphs if shape.plan] == [64, 64]


def test_a_wider_graph_for_which_memory_is_missing_leaves_the_narrower_ones() -> None:
    def hungry(*given: Any) -> Result:
        if given[3].block_tables.shape[1] == 64 and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*given)

    with PretendCuda():
        graphs = ForwardGraphs(hungry)
        for seed, long in enumerate([False] * 5 + [True, False]):
            forward(graphs, inputs_of([(700, 1, ())] if long else CHAINS, seed))[0].cpu()
        assert (graphs.graphs.num_calls, graphs.graphs.num_replayed) == (7, 5 - 1 - module.NUM_CHECKS + 1)


def test_a_pass_is_repeated_only_while_a_graph_is_tried() -> None:
    """Large forward passes have no graph."""
    turns: list[int] = []
    with PretendCuda():
        graphs = ForwardGraphs(run)

        def step(turn: int, requests: Requests) -> None:
            turns.append(turn)
            forward(graphs, inputs_of(requests, turn))[0].cpu()

        for requests in ([(0, 300, ())], CHAINS, CHAINS):
            until_replayed(graphs, partial(step, requests=requests))
            turns.append(-1)
    assert turns == [1, -1, *range(1, module.NUM_CHECKS + 3), -1, 1, -1]


@pytest.mark.parametrize(("max_model_len", "max_blocks"), [(0, 2), (60, 4), (64, 4), (10**6, 512)])
def test_tables_have_room_for_longer_requests(max_model_len: int, max_blocks: int) -> None:
    with PretendCuda():
        graphs = ForwardGraphs(run)
        graphs.graphs.allow_length(max_model_len)
        for requests in (CHAINS, [(9, 1, ())]):
            forward(graphs, inputs_of(requests, 0))
        assert {shape.plan.max_blocks for shape in graphs.graphs._graphs if shape.plan} == {max_blocks}


def test_block_tables_of_other_graphs_do_not_make_inputs_others() -> None:
    with PretendCuda():
        graphs = ForwardGraphs(run)
        for seed in range(9):
            forward(graphs, inputs_of(CHAINS, 0))[0].cpu()
            forward(graphs, inputs_of([(3, 1, ())] * 50, seed))[0].cpu()
        assert graphs.graphs.num_replayed == 9 - 1 - module.NUM_CHECKS, "of the others only"
