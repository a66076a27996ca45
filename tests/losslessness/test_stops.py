"""If a request ends inside an accepted draft, its output is cut where plain decoding would have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import random_tree
import reference
from tiny_models import save_tiny_model

NUM_TOKENS = 40
OPTIONS = {"correct": 1.0, "full": True}


@pytest.fixture(scope="module", params=["chain", "tree"])
def options(request: pytest.FixtureRequest) -> dict:
    return {**OPTIONS, "shape": request.param}


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    return reference.prompts(200, [4, 9, 17, 30, 12, 25, 3, 40], seed=7)


@pytest.fixture(scope="module")
def long_references(tiny_models: dict, long_prompts: list) -> list[list[int]]:
    model = reference.load(tiny_models["llama"])
    return [reference.greedy(model, prompt, NUM_TOKENS).token_ids for prompt in long_prompts]


def know(prompts: list, references: list) -> None:
    random_tree.TRUTH.update(zip(map(tuple, prompts), references, strict=True))


def last_draft(prompt: list[int]) -> random_tree.Drafted:
    return [drafted for drafted in random_tree.DRAFTED if drafted.prompt == tuple(prompt)][-1]


def num_past_the_end(prompt: list[int], output: list[int]) -> int:
    """Return how many right draft tokens the last draft tree has beyond the end of the output."""
    drafted = last_draft(prompt)
    return drafted.num_tokens + drafted.num_right - len(prompt) - len(output)


def ended_in_a_path(prompt: list[int], output: list[int]) -> bool:
    """Return whether the output's last token was a draft token of the last draft tree, or followed an accepted one."""
    drafted = last_draft(prompt)
    return drafted.num_right > 0 and drafted.num_tokens < len(prompt) + len(output)


def cut_at(tokens: list[int], stop: int) -> list[int]:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.parametrize("which", [0, 1, 2])
def test_end_of_sequence(
    options: dict, which: int, tmp_path: Path, long_prompts: list, long_references: list, make_llm: Any, generate: Any
) -> None:
    """An end-of-sequence token ends an output even if more draft tokens are right. The output includes the token."""
    from specdec_core import SamplingParams

    stop = long_references[which][NUM_TOKENS // 2]
    folder = save_tiny_model("llama", tmp_path, eos_token_id=stop)
    know(long_prompts, long_references)
    llm = make_llm(folder, "random_tree", options=options)
    outputs = generate(llm, long_prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    expected = [cut_at(tokens, stop) for tokens in long_references]
    assert [output.token_ids for output in outputs] == expected
    reasons = ["stop" if stop in tokens else "length" for tokens in long_references]
    assert [output.finish_reason for output in outputs] == reasons
    assert set(random_tree.FINISHED.values()) == set(reasons)
    inside = [
        num_past_the_end(p, e) for p, e in zip(long_prompts, expected, strict=True) if e[-1] == stop and len(e) > 1
    ]
    assert max(inside, default=0) > 0, "no accepted path ran past the end: nothing was cut"


def test_ignored_end_of_sequence(
    options: dict, tmp_path: Path, long_prompts: list, long_references: list, make_llm: Any, generate: Any
) -> None:
    from specdec_core import SamplingParams

    folder = save_tiny_model("llama", tmp_path, eos_token_id=long_references[0][NUM_TOKENS // 2])
    know(long_prompts, long_references)
    llm = make_llm(folder, "random_tree", options=options)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert [output.token_ids for output in generate(llm, long_prompts, params)] == long_references


def test_max_tokens(
    options: dict, tiny_models: dict, long_prompts: list, long_references: list, make_llm: Any, generate: Any
) -> None:
    from specdec_core import SamplingParams

    llm = make_llm(tiny_models["llama"], "random_tree", options=options)
    for max_tokens in (1, 2, 3, 5, 11, 20):
        random_tree.forget_everything()
        know(long_prompts, long_references)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = generate(llm, long_prompts, params)
        assert [output.token_ids for output in outputs] == [tokens[:max_tokens] for tokens in long_references]
        assert {output.finish_reason for output in outputs} == {"length"}
        if max_tokens > 2:  # with 1 or 2, nothing is left to draft for
            ends = zip(long_prompts, outputs, strict=True)
            assert any(ended_in_a_path(prompt, output.token_ids) for prompt, output in ends)
        assert all(d.num_tokens + 1 - len(d.prompt) < max_tokens for d in random_tree.DRAFTED), "a draft for nothing"


def test_max_model_len(
    options: dict, tiny_models: dict, long_prompts: list, long_references: list, make_llm: Any, generate: Any
) -> None:
    from specdec_core import SamplingParams

    max_model_len = 43
    llm = make_llm(tiny_models["llama"], "random_tree", options=options, max_model_len=max_model_len)
    know(long_prompts, long_references)
    outputs = generate(llm, long_prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    expected = [t[: max_model_len - len(p)] for p, t in zip(long_prompts, long_references, strict=True)]
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}
    cut = [(p, e) for p, e in zip(long_prompts, expected, strict=True) if len(e) < NUM_TOKENS]
    assert any(ended_in_a_path(prompt, output) for prompt, output in cut)


def test_streamed_tokens_are_those_generated_and_only_they_are_counted(
    options: dict, tmp_path: Path, long_prompts: list, long_references: list, make_llm: Any, counter: Any
) -> None:
    """Draft tokens after the end of an output are neither streamed nor counted as accepted."""
    from specdec_core import SamplingParams

    stop = long_references[0][NUM_TOKENS // 2]
    folder = save_tiny_model("llama", tmp_path, eos_token_id=stop)
    know(long_prompts, long_references)
    llm = make_llm(folder, "random_tree", options=options)
    streamed: list[list[int]] = [[] for _ in long_prompts]
    reasons: list[list[str]] = [[] for _ in long_prompts]
    num_accepted = 0
    requests = [{"prompt_token_ids": prompt} for prompt in long_prompts]
    for output in llm.stream(requests, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)):
        assert not reasons[output.prompt_index], "something came after the end"
        streamed[output.prompt_index] += [piece.token_id for piece in output.pieces]
        num_accepted += sum(piece.is_draft for piece in output.pieces)
        reasons[output.prompt_index] += [output.finish_reason] if output.finish_reason else []
    assert streamed == [cut_at(tokens, stop) for tokens in long_references]
    assert reasons == [["stop" if stop in tokens else "length"] for tokens in long_references]
    assert counter(llm, "num_accepted_tokens") == num_accepted > 10
