"""With specdec-kernels on a CPU, tokens and hidden states are bit-identical with and without draft trees, and in
whatever chunks a prompt is computed, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import random_tree
import torch

from specdec_core import SamplingParams
from specdec_core.models import Model

lanes = pytest.importorskip("specdec_kernels.cpu.lanes")

NUM_TOKENS = 24


@pytest.mark.parametrize("model_dir", ["llama", "embedded"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_no_bit(
    dtype: str, model_dir: Any, make_llm: Any, prompts: list, generate: Any, counter: Any
) -> None:
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU computes no bfloat16")
    prompts = prompts[:8]
    params = [
        SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def run(truth: dict, **options: Any) -> tuple[Any, list[list[int]], dict[str, torch.Tensor]]:
        random_tree.forget_everything()
        random_tree.TRUTH.update(truth)
        llm = make_llm(
            model_dir,
            "random_tree",
            options={"keep_features": True, **options},
            dtype=dtype,
            max_num_batched_tokens=1024,
        )
        token_ids = [output.token_ids for output in generate(llm, prompts, params)]
        return llm, token_ids, {request: torch.cat(found) for request, found in random_tree.FEATURES.items()}

    _, plain, features = run({}, max_depth=0)
    truth = dict(zip(map(tuple, prompts), plain, strict=True))
    llm, token_ids, features_with_trees = run(truth, full=True, correct=0.9)
    assert token_ids == plain
    assert counter(llm, "num_draft_tokens") > counter(llm, "num_accepted_tokens") > 50
    assert len(features) == len(prompts)
    for request, prompt in zip(features, prompts, strict=True):
        n = len(prompt) + NUM_TOKENS - 1  # the last token was computed in neither run, or in one alone
        assert torch.equal(features[request][:n], features_with_trees[request][:n])
        assert min(len(features[request]), len(features_with_trees[request])) >= n


PROMPTS = [[(7 * i + k) % 8000 for i in range(n)] for k, n in enumerate([150, 90, 5])]


@pytest.fixture
def features_in_chunks(make_llm: Any, generate: Any) -> Any:
    """Return a function that computes PROMPTS and 4 more tokens, and returns the requests' hidden states in order."""

    def run(model_dir: Any, dtype: str, max_num_batched_tokens: int) -> list[torch.Tensor]:
        if not lanes.is_supported(getattr(torch, dtype)):
            pytest.skip("this CPU lacks the instructions")
        random_tree.forget_everything()
        options = {"keep_features": True, "max_depth": 0}
        sizes = {"dtype": dtype, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 256}
        generate(make_llm(model_dir, "random_tree", options=options, **sizes), PROMPTS, SamplingParams(max_tokens=4))
        return [torch.cat(found) for _, found in sorted(random_tree.FEATURES.items())]

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_dir", ["embedded"], indirect=True)
def test_chunks_of_prompts_change_no_bit(dtype: str, model_dir: Any, features_in_chunks: Any) -> None:
    whole, chunks = features_in_chunks(model_dir, dtype, 1024), features_in_chunks(model_dir, dtype, 40)
    assert [len(each) for each in whole] == [len(prompt) + 3 for prompt in PROMPTS]
    assert all(map(torch.equal, whole, chunks))


@pytest.mark.parametrize("model_dir", ["embedded"], indirect=True)
def test_a_wrong_position_in_later_chunks_is_noticed(
    model_dir: Any, features_in_chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, forward = features_in_chunks(model_dir, "bfloat16", 1024), Model.forward

    def shifted(model: Model, token_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kw: Any) -> Any:
        return forward(model, token_ids, positions + (positions >= 40), *args, **kw)

    monkeypatch.setattr(Model, "forward", shifted)
    chunks = features_in_chunks(model_dir, "bfloat16", 40)
    assert [torch.equal(*pair) for pair in zip(whole, chunks, strict=True)] == [False, False, True]
