"""The proposer's own metrics: the size of the cache of outputs, and how often it had the better draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_core import LLM, Gauge, SamplingParams, SpecdecError
from specdec_proposer_suffix.cache import OutputCache
from specdec_testing import tiny_target

PREFIX = "vllm:spec_decode_suffix_"
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def figures(llm: LLM) -> dict[str, Any]:
    found = [metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)]
    gauges = {metric.name.removeprefix(PREFIX) for metric in found if isinstance(metric, Gauge)}
    assert gauges == {"cache_outputs", "cache_bytes"}
    return {metric.name.removeprefix(PREFIX): metric.value for metric in found}


def check_figures(target: Path, **options: Any) -> None:
    """The second request has the first one's output, so its drafts come from the cache."""
    config = {"method": "suffix", "adaptive_draft_length": False, **options}  # what pays depends on measured times
    with LLM(target, skip_tokenizer_init=True, max_model_len=64, speculative_config=config) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        empty = figures(llm)
        assert (empty["cache_outputs"], empty["cache_queries"], empty["cache_hits"]) == (0, 0, 0)
        llm.generate([prompt], PARAMS, use_tqdm=False)
        first = figures(llm)
        assert first["cache_outputs"] == 1
        assert first["cache_bytes"] >= empty["cache_bytes"] + 4 * 24
        assert first["cache_queries"] > first["cache_hits"] == 0
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        second = figures(llm)
    assert output.speculation.num_accepted > 5
    assert second["cache_outputs"] == 2
    assert second["cache_queries"] - first["cache_queries"] >= second["cache_hits"] > 1


@pytest.mark.parametrize("options", [{}, {"suffix_decoding_use_tree": True}, {"suffix_decoding_eviction": "lru"}])
def test_the_cache_is_counted(options: dict[str, Any], target: Path) -> None:
    check_figures(target, **options)


def test_a_cache_that_counts_finished_outputs_twice_is_noticed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = property(lambda self: 2 * len(self.sequences) + self._num_running)
    monkeypatch.setattr(OutputCache, "num_sequences", twice)
    with pytest.raises(AssertionError):
        check_figures(target)


def test_outputs_can_be_forgotten(target: Path) -> None:
    config = {"method": "suffix", "adaptive_draft_length": False}
    with LLM(target, skip_tokenizer_init=True, max_model_len=64, speculative_config=config) as llm:
        prompt, accepted = {"prompt_token_ids": [1, 2, 3]}, []
        for _ in range(2):
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            accepted.append(output.speculation.num_accepted)
            llm.engine.forget()
            assert figures(llm)["cache_outputs"] == 0
        assert accepted[0] == accepted[1]
        llm.generate([prompt], PARAMS, use_tqdm=False)
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert output.speculation.num_accepted > accepted[0]
        llm.engine.add_request([1, 2, 3], PARAMS)
        with pytest.raises(SpecdecError, match="a request is unfinished"):
            llm.engine.forget()


def test_without_a_cache_there_are_no_hits(target: Path) -> None:
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    with LLM(target, skip_tokenizer_init=True, max_model_len=64, speculative_config=config) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 2, PARAMS, use_tqdm=False)
        found = figures(llm)
    assert (found["cache_outputs"], found["cache_hits"]) == (0, 0)
