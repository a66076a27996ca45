"""With specdec-kernels on a CPU, tokens and hidden states are bit-identical with and without draft trees, and in
whatever chunks a prompt is computed, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import random_tree
import torch

from specdec_core import SamplingParams

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_dir", ["embedded"], indirect=True)
def test_chunks_of_prompts_change_no_bit(dtype: str, model_dir: Any, make_llm: Any, generate: Any) -> None:
    if not lanes.is_supported(getattr(torch, dtype)):
        pytest.skip("this CPU lacks the instructions")
    prompts = [[(7 * i + k) % 8000 for i in range(n)] for k, n in enumerate([150, 90, 5])]

    def run(max_num_batched_tokens: int) -> dict[str, torch.Tensor]:
        random_tree.forget_everything()
        options = {"keep_features": True, "max_depth": 0}
        sizes = {"dtype": dtype, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 256}
        generate(make_llm(model_dir, "random_tree", options=options, **sizes), prompts, SamplingParams(max_tokens=4))
        return {request: torch.cat(found) for request, found in random_tree.FEATURES.items()}

    whole, chunks = run(1024), run(40)
    assert [len(whole[request]) for request in sorted(whole)] == [len(prompt) + 3 for prompt in prompts]
    assert all(torch.equal(whole[request], chunks[request]) for request in whole)
