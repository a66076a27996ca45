"""The GPU benchmark runs its parts in time, whatever fails in them, and counts CUDA calls correctly."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from time import time
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu
from on_gpu import cuda_calls, equality, kernels, steps
from on_gpu.kernel_cases import CASES
from on_gpu.limits import Limits
from on_gpu.setup import SMALL, Setup
from on_gpu.tables import table

from specdec_core import LLM, SamplingParams
from specdec_core.ops import REFERENCE

TO_HOST, FROM_HOST = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"
TO_PINNED = "Memcpy DtoH (Device -> Pinned)"


def event(name, start, end=None, device_type=DeviceType.CPU, **ids):
    time_range = SimpleNamespace(start=start, end=end or start + 1)
    return SimpleNamespace(name=name, device_type=device_type, time_range=time_range, **ids)


def events(*calls):
    """Make profiler events of a step that ends at time 1000, and other events that must not be counted.

    calls: the CUDA calls of the step, from time 10 on. Each is a name, or a pair: the name of the cudaMemcpyAsync call,
        and the name of its copy on the GPU.
    """
    found = [
        event(cuda_calls.REGION, 5, 1000),
        event(cuda_calls.REGION, 0, 5000, device_type=DeviceType.CUDA),  # the GPU's share of it, which lasts longer
        event("cudaLaunchKernel", 4),  # of an earlier step
        event("cudaDeviceSynchronize", 1000),  # the profiler's own
        event("aten::copy_", 10, id=1),  # ids of operators are counted by themselves
    ]
    for i, call in enumerate(calls):
        name, copy = call if isinstance(call, tuple) else (call, None)
        found.append(event(name, 10 + i, id=i + 1))
        if copy is not None:
            found.append(event(copy, 2000 - i, id=i + 1, device_type=DeviceType.CUDA))
    return found[::-1]


def blocking(*calls):
    return cuda_calls.count_calls(events(*calls), 1)["blocking_calls_per_step"]


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuCtxSynchronize"]
)
def test_what_waits_is_blocking(name):
    assert blocking(name) == blocking(f"{name}_v3020") == blocking(f"{name}_ptsz_v7000") == 1
    assert blocking(name, "cudaLaunchKernel", name) == 2


@pytest.mark.parametrize(
    "name", ["cudaLaunchKernel", "cudaMemsetAsync", "cudaStreamWaitEvent", "cudaEventQuery", "cudaMalloc", "aten::item"]
)
def test_what_does_not_wait_is_not(name):
    assert blocking(name, "cudaLaunchKernel") == 0


def test_a_pageable_copy_and_the_wait_for_it_are_one():
    to_host, from_host = ("cudaMemcpyAsync", TO_HOST), ("cudaMemcpyAsync_v3020", FROM_HOST)
    assert blocking(to_host, "cudaStreamSynchronize") == blocking(from_host, "cudaStreamSynchronize_v3020") == 1
    assert blocking(to_host, "cudaLaunchKernel") == blocking(from_host) == 1
    assert blocking(to_host, to_host, "cudaStreamSynchronize", "cudaStreamSynchronize") == 3


def test_a_pinned_copy_is_not_blocking_but_the_wait_for_it_is():
    pinned = ("cudaMemcpyAsync", TO_PINNED)
    assert blocking(pinned, "cudaLaunchKernel") == blocking("cudaMemcpyAsync", "cudaLaunchKernel") == 0
    assert blocking(pinned, "cudaLaunchKernel", "cudaEventSynchronize") == 1


def test_counts_are_per_step():
    launches = ["cudaLaunchKernel", "cudaLaunchKernelExC_v11060", "cuLaunchKernelEx", "cudaGraphLaunch"]
    copies = [("cudaMemcpyAsync", TO_HOST), "cudaStreamSynchronize", "cudaMemcpyAsync"]
    assert cuda_calls.count_calls(events(*launches, *launches, *copies, "cudaLaunchHostFunc"), 4) == {
        "blocking_calls_per_step": 0.25,
        "kernel_launches_per_step": 2,
        "calls_per_step": {
            "cudaLaunchKernel": 0.5,
            "cudaLaunchKernelExC": 0.5,
            "cuLaunchKernelEx": 0.5,
            "cudaGraphLaunch": 0.5,
            "cudaMemcpyAsync DtoH (Device -> Pageable)": 0.25,
            "cudaStreamSynchronize": 0.25,
            "cudaMemcpyAsync (unknown)": 0.25,
            "cudaLaunchHostFunc": 0.25,
        },
    }


def test_without_cuda_the_profiler_sees_no_calls():
    with LLM("tiny", device="cpu", max_model_len=steps.MAX_MODEL_LEN, max_num_seqs=2) as llm:
        found = steps.profile_run(llm.engine, [[5, 6, 7], [8, 9]], SamplingParams(ignore_eos=True), 2)
        assert not llm.engine.has_unfinished
    assert found == {**steps.NO_COUNTS, steps.DRAFTED: 0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("work", "num_blocking", "num_launches"),
    [
        (lambda x: x + 1, 0, 1),
        (lambda x: x[0].item(), 1, 0),
        (lambda x: x.cpu(), 1, 0),
        (lambda x: torch.tensor([1, 2], device="cuda"), 1, 0),
        (lambda x: x.to("cpu", non_blocking=True), 0, 0),
        (lambda x: torch.cuda.synchronize(), 1, 0),
    ],
    ids=["add", "item", "cpu", "tensor", "non_blocking", "synchronize"],
)
def test_calls_of_a_real_gpu(work, num_blocking, num_launches):
    x = torch.ones(4, device="cuda")
    work(x)
    with profile(acc_events=True) as profiler:
        x + 1
        with record_function(cuda_calls.REGION):
            work(x)
            work(x)
            x.fill_(1)  # so that there is a call at all
        torch.cuda.synchronize()
    found = cuda_calls.count_calls(profiler.events(), 1)
    assert found["blocking_calls_per_step"] == 2 * num_blocking, found
    assert found["kernel_launches_per_step"] == 2 * num_launches + 1, found


@pytest.mark.nightly
def test_small_mode(tmp_path):
    output = tmp_path / "gpu.json"
    script = Path(gpu.__file__)
    options = ["--small", "--device", "cpu", "--minutes", "20"]
    result = subprocess.run(
        [sys.executable, script, *options, "--output", output], stdout=subprocess.PIPE, text=True, check=True
    )
    record = json.loads(output.read_text())
    assert record["command"] == f"python benchmarks/gpu.py {' '.join(options)} --output PATH/gpu.json"
    assert record["machine"].keys() >= {"processor", "torch", "gpu", "cuda", "driver"}
    assert record["machine"]["gpu"] is None
    assert record["setup"]["device"] == "cpu"
    assert record["note"] == gpu.NO_MEASUREMENT
    assert gpu.NO_MEASUREMENT in result.stdout
    outputs = [row for row in record["parts"]["equality"] if row["what"] == "greedy output"]
    assert all(row["num_equal"] == row["num_prompts"] for row in outputs)
    assert [row["method"] for row in outputs if not row["num_accepted"]] == ["plain"]
    assert list(record["parts"]) == list(record["seconds"]) == list(gpu.PARTS)
    assert not [row for rows in record["parts"].values() for row in rows if "error" in row or "skipped" in row]
    assert len(result.stdout.splitlines()) > sum(len(rows) for rows in record["parts"].values())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([1.0, NAN], [1.0, -INF]),
        ([1.0, INF], [1.0, -INF]),
        ([1.0, INF], [1.0, 2.0]),
        ([NAN, NAN], [NAN, NAN]),
        ([1.01, 2.0], [1.0, 2.0]),
        ([0.0, 0.0], [1.0, 2.0]),
        ([1.0], [1.0, 1.0]),
        ([5], [5, 5]),
        ([5, 6], [5, 5]),
        ([5, 5], [5.0, 5.0]),
        ([[5.0, 5.0]], [5.0, 5.0]),
    ],
)
def test_what_differs_from_the_reference_is_an_error(found, expected):
    assert "error" in kernels.compare([torch.tensor(found)], [torch.tensor(expected)])


@pytest.mark.parametrize(("found", "expected"), [([1.0, -INF], [1.00001, -INF]), ([5, 6], [5, 6]), ([], [])])
def test_what_is_like_the_reference_is_none(found, expected):
    assert "error" not in kernels.compare([torch.tensor(found)], [torch.tensor(expected)])


def test_results_of_another_number_or_dtype_are_errors():
    result = torch.ones(2)
    assert "error" in kernels.compare([result], [result, result])
    assert "error" in kernels.compare([result.bfloat16()], [result])
    assert "error" in kernels.compare([result * 1.001], [result])
    assert "error" not in kernels.compare([result.bfloat16() * 1.004], [result.bfloat16()])
    assert "error" in kernels.compare([result.bfloat16() * 1.004], [result.bfloat16()], tolerance=0.0)


FAULTS = {
    "none": lambda x: x,
    "zeros": lambda x: x * 0,
    "infinities": lambda x: torch.where(x.isinf(), NAN, x) if x.isinf().any() else x * NAN,
    "dtype": lambda x: x.double(),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["paged_attention", "rms_norm", "truncate", "likeliest"])
def test_the_row_of_a_wrong_kernel_has_an_error(name, fault):
    case = next(CASES[name](SMALL, "cpu"))

    def kernel(*args):
        results = REFERENCE[name](*args)
        change = FAULTS[fault]
        return tuple(map(change, results)) if isinstance(results, tuple) else change(results)

    row = kernels.measure(name, case, kernel, Limits(1.0, 1.0), Setup(sizes=SMALL, device="cpu", until=0))
    assert ("error" in row) == (fault != "none"), row


@pytest.mark.parametrize("num_tokens", [4, SMALL.equality_tokens])
def test_equality_without_accepted_tokens_is_an_error(num_tokens):
    setup = Setup(sizes=evolve(SMALL, equality_tokens=num_tokens), device="cpu", until=0)
    expected = []
    assert "error" not in equality._outputs(setup, "plain", expected)
    row = equality._outputs(setup, "ngram", expected)
    assert row["num_equal"] == row["num_prompts"]
    assert ("error" in row) == (row["num_accepted"] == 0) == (num_tokens == 4)


def test_without_cuda_it_asks_for_the_small_mode(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "use --small" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-3", "nan", "inf", "many"])
def test_minutes_are_positive(monkeypatch, capsys, minutes):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--device", "cpu", f"--minutes={minutes}"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert f"'{minutes}' is not a positive number of minutes" in capsys.readouterr().err


@pytest.mark.parametrize("row", [{"op": "draw", "error": "ValueError: no"}, {"op": "draw", "us": 1.0}])
def test_an_error_is_seen_in_the_exit_status(monkeypatch, capsys, tmp_path, row):
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "rows_of", lambda *args, **kwargs: [row])
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--small", "--device", "cpu", "--only", "plain", "--output", str(output)]
    )
    if "error" in row:
        with pytest.raises(SystemExit, match="errors in plain"):
            gpu.main()
    else:
        gpu.main()
    assert json.loads(output.read_text())["parts"] == {"plain": [row]}
    assert "op" in capsys.readouterr().out


def test_each_part_has_a_share_of_the_time():
    assert sum(part.share for part in gpu.PARTS.values()) == pytest.approx(1)
    until = gpu.deadlines([*gpu.PARTS], 1000, 480)
    assert list(until) == list(gpu.PARTS)
    assert list(until.values()) == sorted(until.values())
    assert until["steps"] == pytest.approx(1480 - gpu.END_S)
    assert until["kernels"] == pytest.approx(1000 + gpu.PARTS["kernels"].share * (480 - gpu.END_S))
    assert gpu.deadlines(["plain"], 1000, 480) == {"plain": 1480 - gpu.END_S}


BEGIN = """
import os, sys, time
file = open(sys.argv[-1], "a+")
def add():
    print('{"a": 1}', file=file, flush=True)
"""


def child(code):
    """A command that runs Python code, in which `add` writes a row."""
    return [sys.executable, "-c", BEGIN + code]


def test_rows_of_a_process_that_ends_well():
    assert gpu.rows_of(child("add()"), time() + 60) == [{"a": 1}]


def test_rows_before_a_crash_are_kept():
    rows = gpu.rows_of(child("add(); file.write('{broken'); file.flush(); os._exit(9)"), time() + 60)
    assert rows == [{"a": 1}, {"error": "its process ended with 9"}]


def test_a_part_that_hangs_is_stopped():
    rows = gpu.rows_of(child("add(); time.sleep(600)"), time() + 5)
    assert rows == [{"a": 1}, {"error": "it was stopped: the time of this part is over"}]


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import gpu
gpu.run([sys.executable, "-c", sys.argv[2], *sys.argv[1:2]], time.time() + 600)
"""
CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import gpu
gpu.end_with_parent()
print("started", file=sys.stderr, flush=True)
time.sleep(30)
print("went on", file=sys.stderr, flush=True)
"""


def test_a_part_that_watches_ends_well():
    quick = CHILD.replace("time.sleep(30)", "time.sleep(0.5)")
    assert gpu.run([sys.executable, "-c", quick, Path(gpu.__file__).parent], time() + 600) == ""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        signal.SIGKILL,
    ],
)
def test_a_part_ends_with_the_process_that_started_it(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, Path(gpu.__file__).parent, CHILD], stderr=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stderr.readline() == "started\n"
        parent.send_signal(number)
        assert "went on" not in parent.stderr.read()  # it ends once both have ended


@pytest.mark.parametrize(("goes_on", "num_rows"), [(True, 3), (False, 1)])
def test_another_process_goes_on_where_the_device_failed(goes_on, num_rows):
    code = "file.seek(0)\nif len(file.readlines()) < 3: add()\nos._exit(3)"
    rows = gpu.rows_of(child(code), time() + 60, goes_on=goes_on)
    assert rows == [*[{"a": 1}] * num_rows, {"error": "its process ended with 3"}]  # the last one got no further


def test_a_part_that_raises_keeps_its_rows(tmp_path, monkeypatch):
    def rows(setup):
        yield {"a": 1}
        raise ValueError("no such thing")

    monkeypatch.setitem(gpu.PARTS, "plain", gpu.Measured(rows, (), 1.0))
    gpu.run_part("plain", Setup(sizes=SMALL, device="cpu", until=0), tmp_path / "rows")
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert written[0].keys() >= {"gpu", "cuda", "driver"}
    assert written[1:] == [{"a": 1}, {"error": "ValueError: no such thing"}]


def test_a_table_shows_errors_and_what_was_skipped():
    rows = [
        {"gb_per_s": 3.0},
        {"op": "draw", "rows": 1, "us": 12.3456, "of_each": [1, 2], "calls": {"launch": 1}},
        {"op": "norm", "width": 7, "us": 1234.5, "share": None},
        {"op": "draw", "rows": 2, "error": "ValueError: no"},
        {"op": "draw", "rows": 3, "skipped": "the time is over"},
        {"op": "draw", "rows": 4, "skipped": "the time is over"},
    ]
    assert list(table(rows, ("us", "calls", "share"))) == [
        "op    rows  width  us",
        "draw  1     -      12.35",
        "norm  -     7      1234",
        "gb_per_s 3",
        "op draw, rows 2, error ValueError: no",
        "2 not measured, since the time is over: op draw, rows 3 and what follows",
    ]
