"""The inputs of CUDA graphs are copied in few launches, and what is left of other calls is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_graphs import CHAINS, TREES, Requests, inputs_of
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from specdec_core.models.graph_buffers import NUM_TOKENS, Buffers, Copies
from specdec_core.models.graph_inputs import Call, Inputs, Shape
from specdec_testing.pretend_cuda import CUDA, OnCuda, PretendCuda

NO_LAUNCHES = ["__get__", "__getitem__", "__len__", "view", "expand", "stride", "numel", "dim", "unsqueeze"]


class Launches(TorchFunctionMode):
    """Counts what is launched on the pretend device. names: of the functions, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_there = any(isinstance(leaf, OnCuda) for leaf in tree_leaves((args, kwargs, result)))
        if is_there and function.__name__ not in NO_LAUNCHES:
            self.names.append(function.__name__)
        return result


def level_of_a_head(requests: Requests, seed: int) -> Call:
    """What a head of one layer gets: token ids, features and positions."""
    token_ids, plan, _ = inputs_of(requests, seed)
    return Call((token_ids, torch.rand(len(token_ids), 8, device=CUDA), plan.visibility.positions), plan)


def launches(requests: Requests) -> list[str]:
    """Of reading a call after another one like it."""
    with PretendCuda():
        call = level_of_a_head(requests, 0)
        shape = Shape.of(call)
        assert shape is not None
        inputs = Inputs.of(shape, Buffers(), CUDA)
        inputs.read(call)
        call = level_of_a_head(requests, 1)
        with Launches() as counted:
            inputs.read(call)
        return counted.names


def test_inputs_are_copied_in_a_few_launches() -> None:
    """Token ids and the like, features, block tables, and one upload."""
    assert sorted(launches(CHAINS)) == ["_foreach_copy_", "_foreach_copy_", "copy_", "copy_"]
    assert sorted(launches(TREES)) == ["_foreach_copy_", "_foreach_copy_", "cat", "copy_", "copy_"]


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_padding_follows_the_rows_of_a_call(number: int) -> None:
    buffers = Buffers()
    numbers, slots = (
        buffers.get(name, torch.int64, sizes, torch.device("cpu"), padding)
        for name, sizes, padding in (("numbers", (2,), 0), ("slots", (), -1))
    )
    for size in (4, number):
        copies = Copies()
        copies.fill(numbers, torch.full((size, 2), 7))
        copies.fill(slots, torch.full((size,), 7))
        copies.run()
    missing = NUM_TOKENS[-1] - number
    assert numbers.rows.tolist() == [[7, 7]] * number + [[0, 0]] * missing
    assert slots.rows.tolist() == [7] * number + [-1] * missing


def test_the_last_slot_of_a_path_repeats() -> None:
    with PretendCuda():
        call = level_of_a_head([(9, 1, (-1, 0, 1, 0))], 0)
        shape = Shape.of(call)
        assert shape is not None
        inputs = Inputs.of(shape, Buffers(), CUDA)
        inputs.read(call)
        assert call.plan is not None
        assert inputs.plan is not None
        found, given = inputs.plan.padded()[3], call.plan.visibility.more_slots
        assert given is not None
        assert (found.shape[1], given.shape[1]) == (4, 3)
        found, given = found.cpu()[: len(given)], given.cpu()
        assert (found[:, :3].tolist(), found[:, 3].tolist()) == (given.tolist(), given[:, 2].tolist())


def test_graphs_of_all_sizes_share_buffers() -> None:
    with PretendCuda():
        buffers, kept = Buffers(), []
        for requests in (CHAINS, [(9, 40, ())], [(9, 1, ())]):
            shape = Shape.of(level_of_a_head(requests, 0), 64)
            assert shape is not None
            kept.append(Inputs.of(shape, buffers, CUDA))
            sizes = buffers.num_bytes
        assert sizes == NUM_TOKENS[-1] * (8 * (2 + 3 + 4) + 2 * 4 + 8 * 4)
        kept.clear()
        assert buffers.num_bytes == 0
