"""`get_metrics` tells how busy an engine is, and what is needed for throughputs."""

from __future__ import annotations

import logging
import re
from time import perf_counter
from typing import Any

import pytest

from specdec_core import LLM, Gauge, Histogram, Request, SamplingParams
from specdec_core.api import session
from specdec_core.engine.step_report import StepTimer
from specdec_core.kv.paged import PagedKVManager

WAITS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def values(llm: LLM) -> dict[str, Any]:
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics()}


def check_load(llm: LLM) -> None:
    """One request of 20 tokens runs, in 2 of 10 blocks, and another one waits."""
    assert [values(llm)[name] for name in BUSY] == [0, 0, 0]
    for _ in range(2):
        llm.engine.add_request(list(range(5, 24)), SamplingParams(max_tokens=3, ignore_eos=True))
    llm.engine.step()
    llm.engine.step()
    assert [values(llm)[name] for name in BUSY] == [1, 1, pytest.approx(0.2)]
    assert {metric.name for metric in llm.get_metrics() if isinstance(metric, Gauge)} == {f"vllm:{n}" for n in BUSY}
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [values(llm)[name] for name in BUSY] == [0, 0, 0]


@pytest.fixture
def llm() -> LLM:
    return LLM("tiny", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=1, num_kv_blocks=10)


def test_how_busy_an_engine_is(llm: LLM) -> None:
    check_load(llm)


def check_waits(llm: LLM) -> None:
    """Of two requests that run one after the other, the second one waits for the first."""
    started = perf_counter()
    for max_tokens in (3, 2):
        llm.engine.add_request(list(range(5, 24)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    seconds = []
    while llm.engine.has_unfinished:
        llm._session.step()
        seconds.append(perf_counter() - started)
    found = {metric.name: metric for metric in llm.get_metrics() if isinstance(metric, Histogram)}
    first, inter, whole = (found[f"vllm:{name}"] for name in WAITS)
    assert (first.count, inter.count, whole.count) == (2, 3, 2)
    assert first.sum <= seconds[0] + seconds[3]
    assert first.sum + inter.sum == pytest.approx(whole.sum)
    assert whole.sum <= seconds[2] + seconds[4]
    assert first.sum > seconds[2], "the second request waits until the first one has ended"


def test_how_long_requests_wait(llm: LLM) -> None:
    check_waits(llm)


def a_request_arrives_when_it_is_scheduled(patch: pytest.MonkeyPatch) -> None:
    append = Request.append

    def arriving(self: Request, *args: Any) -> Any:
        self.arrived_s = self.arrived_s if self.last_token_s else perf_counter()
        return append(self, *args)

    patch.setattr(Request, "append", arriving)


def last_tokens_are_the_first_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "last_token_s", property(lambda self: None, lambda self, seconds: None), raising=False)


@pytest.mark.parametrize("fault", [a_request_arrives_when_it_is_scheduled, last_tokens_are_the_first_ones])
def test_wrong_waits_are_noticed(fault: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_waits(llm)


def test_blocks_that_do_not_count_are_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free = PagedKVManager.num_free_blocks.fget
    monkeypatch.setattr(PagedKVManager, "num_free_blocks", property(lambda self: min(10, free(self) + 1)))
    with pytest.raises(AssertionError):
        check_load(llm)


def test_throughputs_of_two_reads() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM("tiny", max_model_len=128, speculative_config=config) as llm:
        first = values(llm)
        (output,) = llm.generate("x = x + x + x + x +", params, use_tqdm=False)
        grown = {name: value - first[name] for name, value in values(llm).items() if not isinstance(value, list)
                 and name in first}  # fmt: skip
    assert grown["step_seconds"] > grown["spec_decode_target_seconds"] + grown["spec_decode_draft_seconds"] > 0
    assert grown["generation_tokens"] / grown["step_seconds"] > 0
    drafted = (grown["spec_decode_num_draft_tokens"], grown["spec_decode_num_accepted_tokens"])
    assert drafted == (output.speculation.num_draft_tokens, output.speculation.num_accepted)


PHASES = ("draft", "forward", "verify", "other")


def check_phases(llm: LLM) -> None:
    """The phases of a step are all measured, and add up to the time of all steps."""
    llm.generate("x = x + x + x + x +", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    found = values(llm)
    seconds = [found[f"spec_decode_{phase}_seconds"] for phase in PHASES]
    assert min(seconds) > 0
    assert sum(seconds) == pytest.approx(found["step_seconds"])
    assert found["spec_decode_target_seconds"] == pytest.approx(seconds[1] + seconds[2])


@pytest.fixture
def drafting() -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    return LLM("tiny", max_model_len=128, num_kv_blocks=10, speculative_config=config)


def test_the_phases_of_steps(drafting: LLM) -> None:
    check_phases(drafting)


def test_a_phase_that_is_not_measured_is_noticed(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimer, "end_forward_pass", lambda self: None)
    with pytest.raises(AssertionError):
        check_phases(drafting)


def test_the_log_has_the_load_and_the_phases(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOG_INTERVAL_S", 0.0)  # a line after each step
    config = {"method": "ngram", "num_speculative_tokens": 4}
    llm = LLM("tiny", max_model_len=128, max_num_seqs=1, num_kv_blocks=10, speculative_config=config)
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        llm.generate(["x = 1"] * 2, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    first, *_, last = caplog.messages
    assert "1 running and 1 waiting requests, 10% of the KV cache in use" in first
    assert "0 running and 0 waiting requests, 0% of the KV cache in use" in last
    assert re.search(r"s drafting, 0\.\d+ s in forward passes, 0\.\d+ s verifying, 0\.\d+ s for the rest", first)
