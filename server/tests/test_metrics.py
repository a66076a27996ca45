"""/metrics has the engine's counts under vLLM's names, in a registry of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from running_server import ENGINE, Running, limited, wait_for

from specdec_core import AsyncLLM

PROMPT = "def function_1(value):\n    return value + 1\n\n\ndef function_2("


@pytest.fixture
def started() -> Iterator[Running]:
    """A server with an engine of its own, whose counts begin at 0."""
    running = Running(AsyncLLM("tiny", **ENGINE, metrics_prefix="vllm"))
    yield running
    running.stop()
    asyncio.run(running.llm.shutdown())


def samples(running: Running) -> dict[tuple[str, ...], float]:
    """The samples of /metrics: {(name, values of the labels besides model_name): value}."""
    text = running.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_counts(started: Running) -> None:
    before = samples(started)
    assert {value for key, value in before.items() if key[0].startswith("vllm:request_success")} == {0}
    whole = started.complete(PROMPT, temperature=0, max_tokens=32)
    figures, usage = whole["metrics"]["speculative_decoding"], whole["usage"]
    after = samples(started)
    assert after[("vllm:spec_decode_num_drafts_total",)] == figures["num_spec_steps"] > 0
    assert after[("vllm:spec_decode_num_draft_tokens_total",)] == figures["num_draft_tokens"]
    assert after[("vllm:spec_decode_num_accepted_tokens_total",)] == figures["num_accepted_draft_tokens"] > 0
    histogram = figures["acceptance_histogram"]
    for position in range(4):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert after[(name, str(position))] == sum(histogram[position + 1 :])
    assert after[("vllm:prompt_tokens_total",)] == usage["prompt_tokens"]
    assert after[("vllm:generation_tokens_total",)] == usage["completion_tokens"] == 32
    assert after[("vllm:request_success_total", "length")] == 1
    assert (after[("vllm:num_requests_running",)], after[("vllm:num_requests_waiting",)]) == (0, 0)
    assert after[("vllm:kv_cache_usage_perc",)] == 0
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert after[(f"vllm:{name}_count",)] == after[(f"vllm:{name}_bucket", "+Inf")] > 0
        assert after[(f"vllm:{name}_sum",)] > 0
    assert after[("vllm:time_to_first_token_seconds_count",)] == 1


def test_reasons_of_the_end(started: Running) -> None:
    started.complete([PROMPT, PROMPT], max_tokens=1)
    started.complete(PROMPT, max_tokens=64, stop="\n", temperature=0)
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with limited(started.llm, 2), started.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept, since it closes the response when it is dropped
        next(lines)
        busy = samples(started)
    assert busy[("vllm:num_requests_running",)] == 1
    assert 0 < busy[("vllm:kv_cache_usage_perc",)] <= 1
    started.wait_until_idle()
    assert started.post("/v1/completions", prompt=[1] * 512).status_code == 400  # refused: not counted
    wait_for(lambda: samples(started)[("vllm:request_success_total", "abort")] == 1)
    found = samples(started)
    counts = {key[1]: value for key, value in found.items() if key[0] == "vllm:request_success_total"}
    assert counts == {"stop": 1, "length": 2, "abort": 1, "error": 0}


def test_nothing_is_registered_globally(started: Running) -> None:
    started.http.get("/metrics")
    assert not [name for name in REGISTRY._names_to_collectors if "spec_decode" in name]
