"""Completions: several for one prompt, their finish reasons, stop tokens in their text, and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from specdec_core import LLM, CompletionOutput, ConfigError, DraftCounts, Request, SamplingParams
from specdec_core.engine.detokenizer import OutputText

CODE = """def total(prices, rate):
    result = 0
    for price in prices:
        result += price * rate
    return result
"""
TASKS = ("repeat the code unchanged", "rename `rate` to `factor`")
PROMPTS = [f"# Task: {task}\n{CODE}\n# Result:\n" for task in TASKS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("tiny", dtype="float32", max_model_len=512)


@pytest.fixture(scope="module")
def speculating() -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    return LLM("tiny", dtype="float32", max_model_len=512, speculative_config=config)


@pytest.fixture(scope="module")
def tokenizer(plain: LLM) -> Any:
    return plain._session.prompts.tokenizer


@pytest.fixture(scope="module")
def whole(plain: LLM) -> list[CompletionOutput]:
    """Greedy completions of max_tokens tokens, with the end-of-sequence token ignored."""
    return [output.outputs[0] for output in plain.generate(PROMPTS, evolve(GREEDY, ignore_eos=True))]


def streamed(llm: LLM, prompts: Any, params: Any) -> dict[tuple[int, int], CompletionOutput]:
    """Stream completions and join the pieces. Returns each whole completion by (prompt index, completion index)."""
    texts: dict[tuple[int, int], str] = {}
    token_ids: dict[tuple[int, int], list[int]] = {}
    found = {}
    for part in llm.generate(prompts, params, stream=True):
        key = (part.prompt_index, part.index)
        texts[key] = texts.get(key, "") + part.text
        token_ids.setdefault(key, []).extend(piece.token_id for piece in part.pieces)
        if part.finish_reason is not None:
            found[key] = CompletionOutput(part.index, texts[key], token_ids[key], part.finish_reason, part.stop_reason)
    return found


def in_all_ways(plain: LLM, speculating: LLM, prompt: str, params: SamplingParams) -> CompletionOutput:
    """Generate and stream, each with and without speculation. Assert that all four completions are equal, and return
    one."""
    found = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for llm in (plain, speculating)]
    found += [streamed(llm, prompt, params)[0, 0] for llm in (plain, speculating)]
    assert found.count(found[0]) == 4
    return found[0]


def test_several_completions_of_each_prompt(plain: LLM, speculating: LLM) -> None:
    params = [
        SamplingParams(n=3, seed=5, temperature=2.0, max_tokens=12, ignore_eos=True),
        SamplingParams(n=2, seed=6, temperature=2.0, max_tokens=9, ignore_eos=True),
    ]
    outputs = plain.generate(PROMPTS, params)
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0, 1, 2], [0, 1]]
    assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) == 3
    drafted = speculating.generate(PROMPTS, params)
    assert [output.outputs for output in drafted] == [output.outputs for output in outputs]
    expected = {(i, c.index): c for i, output in enumerate(outputs) for c in output.outputs}
    assert streamed(speculating, PROMPTS, params) == expected
    (alone,) = plain.generate(PROMPTS[0], evolve(params[0], n=1))
    assert alone.outputs[0] == outputs[0].outputs[0], "the first one keeps the seed"


def test_the_figures_of_all_completions_are_added_up(speculating: LLM) -> None:
    params = SamplingParams(n=2, seed=1, temperature=0.1, max_tokens=32, ignore_eos=True)
    (together,) = speculating.generate(PROMPTS[0], params)
    each = [speculating.generate(PROMPTS[0], params.of_sample(i))[0].speculation for i in range(2)]
    assert together.speculation == sum(each, DraftCounts())
    assert together.speculation.num_accepted > 0


def test_completions_without_a_seed_differ(plain: LLM) -> None:
    (output,) = plain.generate(PROMPTS[0], SamplingParams(n=4, temperature=2.0, max_tokens=16, ignore_eos=True))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1


def test_a_stream_of_several_completions_can_be_closed(speculating: LLM) -> None:
    stream = speculating.stream(PROMPTS, SamplingParams(n=3, max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not speculating.engine.has_unfinished
    speculating.engine.kv.check_integrity()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_token(plain: LLM, speculating: LLM, whole: list, tokenizer: Any, which: int, includes: bool) -> None:
    tokens = whole[which].token_ids
    stop = tokens[len(tokens) * 2 // 3]
    end = tokens.index(stop)
    params = evolve(GREEDY, stop_token_ids=[stop, 7], ignore_eos=True, include_stop_str_in_output=includes)
    found = in_all_ways(plain, speculating, PROMPTS[which], params)
    assert found.token_ids == tokens[: end + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    shown = found.token_ids if includes else found.token_ids[:-1]
    assert found.text == tokenizer.decode(shown)


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string(plain: LLM, speculating: LLM, whole: list, includes: bool) -> None:
    text = whole[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    params = evolve(GREEDY, stop=["never there", stop], include_stop_str_in_output=includes, ignore_eos=True)
    found = in_all_ways(plain, speculating, PROMPTS[0], params)
    assert found.text == text[: text.index(stop) + len(stop) * includes]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


def test_a_stop_string_before_a_character_that_is_never_finished(tokenizer: Any) -> None:
    unfinished = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == " \N{REPLACEMENT CHARACTER}")
    prompt, params = np.array(tokenizer("x").input_ids), SamplingParams(stop=" ", max_tokens=1)
    text = OutputText(tokenizer, prompt, params)
    request = Request("any", prompt, params, seed=0, max_total_tokens=len(prompt) + 1, text=text)
    request.append([unfinished], 0, frozenset())
    assert (text.text, request.finish_reason, request.stop_reason) == ("", "stop", " ")


def test_of_two_stop_strings_the_one_that_begins_first_counts(plain: LLM, speculating: LLM, whole: list) -> None:
    text = whole[0].text
    word = next(word for word in text.split() if len(word) > 4)
    params = evolve(GREEDY, stop=[word[1:], word, word[:3]], ignore_eos=True)
    found = in_all_ways(plain, speculating, PROMPTS[0], params)
    assert found.text == text[: text.index(word[:3])]
    assert found.stop_reason == word[:3]


@pytest.mark.parametrize(
    ("params", "ending"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|endoftext|>"),
    ],
    ids=str,
)
def test_the_end_of_sequence(plain: LLM, speculating: LLM, tokenizer: Any, params: dict, ending: str) -> None:
    """The output's token ids include the end-of-sequence token.

    The text includes this token only with skip_special_tokens=False and include_stop_str_in_output=True.
    """
    found = in_all_ways(plain, speculating, PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=48, **params))
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    assert found.token_ids[-1] == tokenizer.eos_token_id
    assert found.text == tokenizer.decode(found.token_ids[:-1]) + ending


def test_the_end_of_sequence_as_a_stop_token(plain: LLM, speculating: LLM, tokenizer: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, stop_token_ids=[tokenizer.eos_token_id])
    assert in_all_ways(plain, speculating, PROMPTS[0], params).stop_reason is None
    ignoring = evolve(params, ignore_eos=True)
    assert in_all_ways(plain, speculating, PROMPTS[0], ignoring).stop_reason == tokenizer.eos_token_id


def test_token_ids_without_text(plain: LLM, speculating: LLM, whole: list) -> None:
    params = evolve(GREEDY, detokenize=False, ignore_eos=True, stop_token_ids=whole[0].token_ids[20:21])
    found = in_all_ways(plain, speculating, PROMPTS[0], params)
    assert found.text == ""
    assert found.token_ids == whole[0].token_ids[: len(found.token_ids)]


def test_a_stop_token_that_is_not_in_the_vocabulary(plain: LLM) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids \[10000000\] are not in the vocabulary"):
        plain.generate(PROMPTS[0], SamplingParams(stop_token_ids=[3, 10**7]))
    assert not plain.engine.has_unfinished


def test_a_request_of_the_engine_is_one_completion(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="n=2"):
        plain.engine.add_request([5, 6], SamplingParams(n=2))


def test_figures_of_a_request_and_of_the_engine_agree() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    llm = LLM("tiny", dtype="float32", speculative_config=config, max_num_batched_tokens=33)
    outputs = llm.generate(PROMPTS, GREEDY)
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert all(name.startswith("vllm:") for name in metrics)
    totals = sum((output.speculation for output in outputs), DraftCounts())
    assert metrics["vllm:spec_decode_num_drafts"] == totals.num_drafts > 0
    assert metrics["vllm:spec_decode_num_draft_tokens"] == totals.num_draft_tokens
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == totals.num_accepted
    per_pos = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert per_pos[: len(totals.accepted_per_pos)] == totals.accepted_per_pos
    assert totals.acceptance_length == pytest.approx(1 + sum(totals.acceptance_rate_per_pos))
    assert metrics["vllm:generation_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert metrics["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert 0 < metrics["vllm:spec_decode_draft_seconds"] < metrics["vllm:spec_decode_target_seconds"]


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_prompt_tokens_are_told_from_decoded_ones(plain: LLM, num_tokens: int) -> None:
    """Every prompt token counts as a prefill token, even if the last one is a prefill chunk by itself."""
    llm = LLM("tiny", skip_tokenizer_init=True, max_num_batched_tokens=16, max_model_len=64)
    llm.engine.add_request(list(range(5, 5 + num_tokens)), SamplingParams(max_tokens=4, ignore_eos=True))
    reports = []
    while llm.engine.has_unfinished:
        reports.append(llm.engine.step())
    assert sum(report.num_prefill_tokens for report in reports) == num_tokens
    assert sum(report.num_decode_requests for report in reports) == 3
    assert sum(report.num_output_tokens for report in reports) == 4
    assert [sum(report.output_per_request.values()) for report in reports] == [r.num_output_tokens for r in reports]


@pytest.mark.parametrize(("delay_s", "is_shown"), [(1e6, False), (0.0, True)])
def test_the_bar_is_shown_after_a_while(
    plain: LLM, delay_s: float, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdec_core.api.llm.BAR_DELAY_S", delay_s)
    plain.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    assert ("request" in capfd.readouterr().err) == is_shown
