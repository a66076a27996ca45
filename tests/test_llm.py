"""`LLM` on the embedded model: vLLM's examples run unchanged; text, stop strings and streaming work."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, SamplingParams

PROMPT = "def read_lines(path):\n    with open(path) as stream:\n        return"
SNIPPET = """def total(prices, rate):
    result = 0
    for price in prices:
        result += price * rate
    return result
"""
REPEATING = [
    f"# Task: {task}\n{SNIPPET}\n# Result:\n"
    for task in ("repeat the code unchanged", "rename `rate` to `factor`", "rename `price` to `amount`")
]
TEN_PROMPTS = [f"def function_{i}(value):\n    return value + {i}\n\n\ndef function_{i + 1}(" for i in range(10)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("tiny", dtype="float32", max_model_len=512)


@pytest.fixture(scope="module")
def speculating() -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    return LLM("tiny", dtype="float32", max_model_len=512, speculative_config=config)


def value(llm: LLM, name: str) -> Any:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_{name}")


def test_the_usual_example_runs_as_written() -> None:
    prompts = ["The future of AI is", "import os\n"]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=100)
    llm = LLM(
        model="tiny",
        tensor_parallel_size=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    )
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output.outputs[0].text, str)
        assert 1 <= len(output.outputs[0].token_ids) <= 100
    metrics = {m.name: m.value for m in llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_drafts"] > 0
    assert len(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]) == 5


def test_drafts_stop_while_too_many_requests_run() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    llm = LLM("tiny", speculative_config={**config, "disable_by_batch_size": 8})
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(TEN_PROMPTS, params)
    assert len(outputs) == 10
    assert value(llm, "num_drafts") == 0, "ten requests ran together from the first to the last step"
    llm.generate(TEN_PROMPTS[:8], params)
    assert value(llm, "num_drafts") > 0


def test_prompts_of_every_kind(plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    token_ids = plain.generate(PROMPT, params)[0].prompt_token_ids
    as_text, as_dict, as_ids = plain.generate([PROMPT, {"prompt": PROMPT}, {"prompt_token_ids": token_ids}], params)
    assert as_text.outputs == as_dict.outputs == as_ids.outputs
    assert (as_text.prompt, as_ids.prompt) == (PROMPT, None)


def test_one_sampling_params_for_each_prompt(plain: LLM) -> None:
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(output.outputs[0].token_ids) for output in plain.generate([PROMPT] * 2, each)] == [3, 5]
    with pytest.raises(ConfigError, match="2 sampling_params for 3 prompts"):
        plain.generate([PROMPT] * 3, each)


def test_token_ids_alone() -> None:
    llm = LLM("tiny", skip_tokenizer_init=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) <= 4
    with pytest.raises(ConfigError, match="prompt_token_ids"):
        llm.generate("text")


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 3}], ids=["greedy", "sampled"])
def test_streamed_text_is_the_whole_text(plain: LLM, speculating: LLM, settings: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=64, **settings)
    expected = [output.outputs[0] for output in plain.generate(REPEATING, params)]
    texts, token_ids, reasons = [""] * 3, [[] for _ in range(3)], [None] * 3
    drafted = 0
    for event in speculating.stream(REPEATING, params):
        assert reasons[event.prompt_index] is None, "it had ended"
        texts[event.prompt_index] += event.text
        token_ids[event.prompt_index] += [piece.token_id for piece in event.pieces]
        reasons[event.prompt_index] = event.finish_reason
        drafted += sum(piece.is_draft for piece in event.pieces)
    assert texts == [completion.text for completion in expected]
    assert token_ids == [completion.token_ids for completion in expected]
    assert reasons == [completion.finish_reason for completion in expected]
    assert drafted > 0


def test_a_stream_that_is_closed_cancels_its_requests(speculating: LLM) -> None:
    stream = speculating.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not speculating.engine.has_unfinished
    speculating.engine.kv.check_integrity()


def test_stop_strings_end_the_text_alike_with_and_without_drafts(plain: LLM, speculating: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=64)
    whole = [output.outputs[0].text for output in plain.generate(REPEATING, free)]
    stops = [text[len(text) * 2 // 3 : len(text) * 2 // 3 + 5] for text in whole]
    each = [SamplingParams(temperature=0.0, max_tokens=64, stop=stop) for stop in stops]
    before = value(speculating, "num_accepted_tokens")
    for text, stop, a, b in zip(
        whole, stops, plain.generate(REPEATING, each), speculating.generate(REPEATING, each), strict=True
    ):
        assert a.outputs == b.outputs
        assert a.outputs[0].text == text[: text.index(stop)]
        assert a.outputs[0].finish_reason == "stop"
    assert value(speculating, "num_accepted_tokens") > before, "no stop can have come inside an accepted draft"


def test_a_request_may_ask_for_fewer_drafts(speculating: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, num_speculative_tokens=0)
    (output,) = speculating.generate(TEN_PROMPTS[0], params)
    assert output.speculation.num_drafts == 0
    with pytest.raises(ConfigError, match="exceeds the engine's 5"):
        speculating.generate(PROMPT, SamplingParams(num_speculative_tokens=6))


def test_a_folder_of_the_same_name_does_not_hide_the_embedded_model(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_core import resolve_model

    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny").endswith("weights")
    assert resolve_model("./tiny") == "./tiny"


def test_numbers_of_other_libraries_are_numbers(plain: LLM) -> None:
    import numpy as np

    params = SamplingParams(
        temperature=np.float32(0.5), top_p=Fraction(9, 10), top_k=np.int64(5), seed=np.int64(3), max_tokens=4.0
    )
    same = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=3, max_tokens=4)
    assert params == same
    assert plain.generate(PROMPT, params)[0].outputs == plain.generate(PROMPT, same)[0].outputs


@pytest.mark.parametrize(("delay_s", "shown"), [(3600.0, ""), (0.0, "2/2")])
def test_the_bar_waits_for_its_delay(
    plain: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, delay_s: float, shown: str
) -> None:
    monkeypatch.setattr("specdec_core.api.llm.BAR_DELAY_S", delay_s)
    plain.generate(TEN_PROMPTS[:2], SamplingParams(temperature=0, max_tokens=2))
    bar = capsys.readouterr().err
    assert shown in bar
    assert bool(bar) == bool(shown)
