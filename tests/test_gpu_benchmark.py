"""The GPU benchmark runs in its small mode, and counts CUDA calls correctly."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu

from specdec_core import LLM, SamplingParams

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
        event(gpu.REGION, 5, 1000),
        event(gpu.REGION, 0, 5000, device_type=DeviceType.CUDA),  # the GPU's share of it, which lasts longer
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
    return gpu.count_calls(events(*calls), 1)["blocking_calls_per_step"]


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
    assert gpu.count_calls(events(*launches, *launches, *copies, "cudaLaunchHostFunc"), 4) == {
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
    with LLM("tiny", device="cpu", max_model_len=gpu.MAX_MODEL_LEN, max_num_seqs=2) as llm:
        found = gpu.profile_run(llm.engine, [[5, 6, 7], [8, 9]], SamplingParams(ignore_eos=True), 2)
        assert not llm.engine.has_unfinished
    assert found == {**gpu.NO_COUNTS, gpu.DRAFTED: 0}


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
    with profile() as profiler:
        x + 1
        with record_function(gpu.REGION):
            work(x)
            work(x)
            x.fill_(1)  # so that there is a call at all
        torch.cuda.synchronize()
    found = gpu.count_calls(profiler.events(), 1)
    assert found["blocking_calls_per_step"] == 2 * num_blocking, found
    assert found["kernel_launches_per_step"] == 2 * num_launches + 1, found


@pytest.mark.nightly
def test_small_mode(tmp_path):
    output = tmp_path / "gpu.json"
    options = ["--small", "--device", "cpu", "--only", "tiny", "--max-tokens", "8", "--batches", "1", "2"]
    script = Path(gpu.__file__)
    result = subprocess.run(
        [sys.executable, script, *options, "--output", output], stdout=subprocess.PIPE, text=True, check=True
    )
    record = json.loads(output.read_text())
    assert record["command"] == f"python benchmarks/gpu.py {' '.join(options)} --output PATH/gpu.json"
    assert record["machine"].keys() >= {"processor", "torch", "gpu", "cuda", "driver"}
    assert record["machine"]["gpu"] is None
    assert (record["setup"]["device"], record["setup"]["max_tokens"]) == ("cpu", 8)

    rows = record["rows"]
    keys = [(row["model"], row["batch"], row["temperature"], row["method"]) for row in rows]
    methods = ("plain", "ngram", "eagle3")
    assert keys == [
        ("tiny", batch, temperature, method) for batch in (1, 2) for temperature in (0, 1) for method in methods
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["ms_per_step"] > 0
        assert len(row["tokens_per_s_of_each_round"]) == 1
        assert {row[key] for key in gpu.NO_COUNTS} == {None}
        if row["method"] == "plain":
            assert (row["speed_up"], row["acceptance_length"], row["num_speculative_tokens"]) == (1, 1, 0)
        else:
            assert row["num_speculative_tokens"] > 0
    assert len(result.stdout.splitlines()) == 1 + len(rows)


def test_the_random_model_and_its_head_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--device", "cpu", "--batches", "2"])
    llms = gpu.load("llama", gpu.arguments(), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    drafts = {name: gpu.complete(llm, [gpu.prompts_for(llm, 2, 16)], params) for name, llm in llms.items()}
    assert drafts["plain"].num_drafts == 0
    assert drafts["eagle3"].num_draft_tokens > drafts["eagle3"].num_drafts > 0


def test_without_cuda_it_asks_for_the_small_mode(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "use --small" in capsys.readouterr().err
