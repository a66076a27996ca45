"""Any function of tensors runs as CUDA graphs, on a pretend GPU: when one is captured, trusted, refused and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Lock, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec_core.models import graphs as module
from specdec_core.models.graph_inputs import Call, Tensors
from specdec_core.models.graphs import Graphs
from specdec_core.ops.upload import upload
from specdec_testing.pretend_cuda import CUDA, PretendCuda


def test_a_result_of_another_shape_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []

    with PretendCuda(), caplog.at_level("INFO"):
        graphs = Graphs(lambda call: (call.tensors[0][:, None].expand(-1, sizes[-1]) + 0,), "a function")
        for size in (1, 3, 3):
            sizes.append(size)
            graphs(Call((torch.ones(2, device=CUDA),)))
        assert graphs.is_off
    assert "the graph's result is torch.float32 [2, 1], not torch.float32 [2, 3]" in caplog.text


def test_a_graph_is_not_trusted_for_inputs_that_stay_the_same() -> None:
    """It may repeat a number of the host, which is right as long as the inputs are those of the capture."""
    numbers: list[float] = []

    with PretendCuda():
        graphs = Graphs(lambda call: (call.tensors[0] * 0 + numbers[-1],), "a function")
        for number in [1.0] * 9 + [2.0, 3.0]:
            numbers.append(number)
            (result,) = graphs(Call((torch.full((1,), number, device=CUDA),)))
            assert result.item() == number
        assert (graphs.num_replayed, graphs.is_off) == (0, True)


@pytest.mark.parametrize(
    "other",
    [
        lambda given: Call((given[:3].double(),)),
        lambda given: Call((given[:3].unsqueeze(1).repeat(1, 2),)),
        lambda given: Call((given[:3],), fixed=("i", 1)),
        lambda given: Call((given,)),
    ],
    ids=["dtype", "width", "fixed", "tokens"],
)
def test_calls_of_another_shape_have_another_graph(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    monkeypatch.setattr(module, "NUM_CHECKS", 0)
    number = {None: 0, ("i", 1): 1}
    with PretendCuda():
        given = torch.arange(9.0, device=CUDA)
        for calls in ([Call((given[:3],)), other(given)], [other(given), Call((given[:3],))]):
            graphs = Graphs(lambda call: (call.tensors[0] * 3 + number[call.fixed],), "a function")  # type: ignore[index]
            for call in calls * 2:
                (found,) = graphs(call)
                expected = call.tensors[0] * 3 + number[call.fixed]  # type: ignore[index]
                assert (found.dtype, found.cpu().tolist()) == (expected.dtype, expected.cpu().tolist())
            assert (graphs.num_replayed, len(graphs._graphs)) == (2, 2)


def test_calls_without_tokens_are_not_captured() -> None:
    with PretendCuda():
        graphs = Graphs(lambda call: (call.tensors[0] + 1,), "a function")
        assert graphs(Call((torch.zeros(0, 3, device=CUDA),)))[0].shape == (0, 3)
        assert not graphs._graphs


@pytest.mark.parametrize("values", [[1], np.ones(1), torch.ones(1)], ids=["list", "array", "tensor"])
def test_values_from_the_host_are_not_captured(caplog: pytest.LogCaptureFixture, values: Any) -> None:
    with PretendCuda(), caplog.at_level("INFO"):
        graphs = Graphs(lambda call: (call.tensors[0] + upload(values, CUDA),), "a function")
        for _ in range(2):
            assert graphs(Call((torch.ones(1, device=CUDA),)))[0].item() == 2
        assert (graphs.is_off, graphs.num_replayed) == (True, 0)
    assert "values were copied from the host while a CUDA graph was captured" in caplog.text


@pytest.mark.parametrize("is_hidden", [False, True], ids=["itself", "hidden"])
def test_a_graph_for_which_memory_is_missing_is_left_out(caplog: pytest.LogCaptureFixture, is_hidden: bool) -> None:
    attempts: list[int] = []

    def hungry(call: Call) -> Tensors:
        if len(call.tensors[0]) in (4, 8) and torch.cuda.is_current_stream_capturing():
            attempts.append(len(call.tensors[0]))
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
            finally:
                if is_hidden:  # the capture that ends fails, too
                    raise RuntimeError("capture was not ended")
        return (call.tensors[0] + 1,)

    with PretendCuda(), caplog.at_level("WARNING"):
        graphs = Graphs(hungry, "a function")
        for number in range(20):
            size = (2, 4, 8)[number % 3]
            (found,) = graphs(Call((torch.full((size,), float(number), device=CUDA),)))
            assert found.cpu().tolist() == [number + 1] * size
        assert (graphs.is_off, [shape.num_tokens for shape in graphs._graphs], attempts) == (False, [2], [4, 8])
        assert graphs.num_replayed == 7 - 1 - module.NUM_CHECKS
    (record,) = caplog.records
    assert "a CUDA graph of a function with 4 tokens" in record.message
    assert "Lower gpu_memory_utilization, or set enforce_eager=True" in record.message


def test_there_are_no_more_graphs_than_memory_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    with PretendCuda():
        graphs = Graphs(lambda call: (call.tensors[0] + 1,), "a function")
        for size in (1, 2, 4, 8) * 5:
            graphs(Call((torch.full((size,), float(size), device=CUDA),)))
        assert [shape.num_tokens for shape in graphs._graphs] == [1, 2]


def test_two_engines_do_not_capture_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, other_is_inside = Lock(), Event()

    @contextmanager
    def capture(*args: Any, **options: Any) -> Iterator[None]:
        if not inside.acquire(blocking=False):
            other_is_inside.set()
            yield
            return
        other_is_inside.wait(0.3)
        yield
        inside.release()

    for name, fake in {
        "graph": capture,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "Stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = [Graphs(lambda call: (call.tensors[0] + 1,), "a function") for _ in range(2)]
    threads = [Thread(target=each, args=(Call((torch.ones(1),)),)) for each in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each._graphs) for each in graphs] == [1, 1]
    assert not other_is_inside.is_set()


def test_tries_with_the_same_inputs_count_once() -> None:
    with PretendCuda():
        graphs = Graphs(lambda call: (call.tensors[0] + 1,), "a function")
        replayed = []
        for number in [1.0, *[2.0] * 5, 3.0, 4.0]:
            graphs(Call((torch.full((1,), number, device=CUDA),)))[0].cpu()
            replayed.append(graphs.num_replayed)
        assert replayed == [0] * 7 + [1]
