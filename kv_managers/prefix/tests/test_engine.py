"""Tests of prefix caching in the engine: it has cache hits, and outputs are the same as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, PluginError, SamplingParams, load_config_file
from specdec_testing import tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=3)
SETTINGS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 160, "max_num_seqs": 8, "skip_tokenizer_init": True}
SYSTEM = [5, 9, 5, 9, 5, 2, 7, 11, 13, 5, 9, 5, 2, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def llm(folder: Path, kv_manager: str = "prefix", **settings: Any) -> LLM:
    return LLM(folder, kv_manager=kv_manager, **{**SETTINGS, **settings})


def prompt(*last: int, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [*SYSTEM, *last], **more}


def outputs(engine: LLM, prompts: list[dict[str, Any]], params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]


METHODS = [None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}]


@pytest.mark.parametrize("method", METHODS, ids=["plain", "ngram"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_output_is_the_same_and_prefixes_are_found(folder: Path, method: Any, params: SamplingParams) -> None:
    asked = [prompt(i) for i in range(6)]
    expected = outputs(llm(folder, "paged", speculative_config=method), asked, params)
    cached = llm(folder, speculative_config=method)
    first = cached.generate(asked[0], params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, first.outputs[0].token_ids) == (0, expected[0])
    for _ in range(2):
        found = cached.generate(asked, params, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in found] == expected
        assert all(out.num_cached_tokens >= 12 for out in found)
    cached.engine.kv.check_integrity()


def test_a_conversation_goes_on_where_it_was(folder: Path) -> None:
    """In a conversation, each prompt begins with the previous prompt and its output. Both are found in the prefix
    cache."""
    plain, cached = llm(folder, "paged"), llm(folder)
    history = list(SYSTEM)
    for turn in range(3):
        (expected,) = outputs(plain, [{"prompt_token_ids": history}], GREEDY)
        (found,) = cached.generate({"prompt_token_ids": history}, GREEDY, use_tqdm=False)
        assert found.outputs[0].token_ids == expected
        assert found.num_cached_tokens == (0 if turn == 0 else (len(history) - 2) // 4 * 4)
        history = [*history, *expected, 3 + turn]


def test_requests_of_one_batch_share_what_is_there(folder: Path) -> None:
    cached = llm(folder)
    outputs(cached, [prompt(1)], GREEDY)
    before = cached.engine.kv.num_free_blocks
    for i in range(4):
        cached.engine.add_request([*SYSTEM, 20 + i], GREEDY)
    cached.engine.step()
    assert before - cached.engine.kv.num_free_blocks == 3 + 4 * 1, "three blocks are shared, one is each one's own"


def test_salts_keep_requests_apart(folder: Path) -> None:
    cached = llm(folder)
    found = [
        cached.generate(prompt(1, cache_salt=salt), GREEDY, use_tqdm=False)[0].num_cached_tokens
        for salt in ("a", "b", "a", "")
    ]
    assert found == [0, 0, 12, 0]
    with pytest.raises(ConfigError, match="cache_salt=3 of a prompt must be text"):
        cached.generate(prompt(1, cache_salt=3), GREEDY)


def test_prompt_logprobs_are_computed_anew(folder: Path) -> None:
    cached, params = llm(folder), SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    first, second = (cached.generate(prompt(1), params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert {metric.name: metric.value for metric in cached.get_metrics()}["vllm:prefix_cache_queries"] == 0
    assert second.prompt_logprobs == first.prompt_logprobs


def test_preempted_requests_find_their_own(folder: Path) -> None:
    asked = [prompt(i) for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=60)
    expected = outputs(llm(folder, "paged", num_kv_blocks=400), asked, params)
    cached = llm(folder, num_kv_blocks=130, max_model_len=256)
    reports: list[Any] = []
    cached.engine._step_finished = reports.append
    assert outputs(cached, asked, params) == expected
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_cached_tokens for report in reports) > 0
    metrics = {metric.name: metric.value for metric in cached.get_metrics()}
    assert metrics["vllm:prefix_cache_queries"] == sum(report.num_queried_tokens for report in reports)
    assert metrics["vllm:prefix_cache_hits"] == sum(report.num_cached_tokens for report in reports)


def test_it_is_chosen_in_a_config_file_too(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "served.toml"
    file.write_text('kv_manager = "prefix"\n[kv_manager_config]\nmax_cached_blocks = 0\n')
    cached = LLM(folder, **SETTINGS, **load_config_file(file))
    assert [cached.generate(prompt(1), GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"kv_manager": "prefxi"}, "unknown kv_manager 'prefxi'. Did you mean 'prefix'?"),
        ({"kv_manager": ""}, "must be text that is not empty"),
        ({"kv_manager_config": {"max_cached_blocks": -1}}, "max_cached_blocks=-1 is too small"),
        ({"kv_manager_config": {"max_cached": 1}}, "has no key 'max_cached': did you mean 'max_cached_blocks'?"),
        ({"kv_manager": "paged", "kv_manager_config": {"x": 1}}, "kv_manager_config of 'paged' has no key 'x'"),
        ({"kv_manager_config": 3}, "kv_manager_config=3 must be a dict"),
    ],
)
def test_refused(folder: Path, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        llm(folder, **keywords)
    assert says in str(caught.value)
