"""With the Triton kernels of specdec-kernels, run by Triton's interpreter, tokens and hidden states are bit-identical
with and without draft trees, and close to those of the reference operations."""

from __future__ import annotations

from typing import Any

import pytest
import random_tree
import torch

from specdec_core import SamplingParams
from specdec_core.engine import build
from specdec_core.ops import REFERENCE

cpu = pytest.importorskip("specdec_kernels.cpu")
gpu = pytest.importorskip("specdec_kernels.gpu", reason="needs triton")

FusedLayers = pytest.importorskip("specdec_kernels.gpu.decoder").FusedLayers

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("model_dir", ["llama"], indirect=True)
def test_trees_change_no_bit(
    model_dir: Any, make_llm: Any, prompts: list, generate: Any, counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts[3:5]  # the shortest: the interpreter takes 10 ms for each program
    monkeypatch.setattr(build, "warm_up", lambda *of: 0.0)

    def run(ops: Any, truth: dict, **options: Any) -> tuple[Any, list[list[int]], list[torch.Tensor]]:
        monkeypatch.setattr(cpu, "OPS", ops)
        monkeypatch.setattr(cpu, "supports", lambda name, context: True)
        random_tree.forget_everything()
        random_tree.TRUTH.update(truth)
        llm = make_llm(model_dir, "random_tree", options={"keep_features": True, **options}, num_kv_blocks=32)
        token_ids = [output.token_ids for output in generate(llm, prompts, GREEDY)]
        return llm, token_ids, [torch.cat(found) for found in random_tree.FEATURES.values()]

    _, plain, features = run(gpu.OPS, {}, max_depth=0)
    truth = dict(zip(map(tuple, prompts), plain, strict=True))
    llm, token_ids, features_with_trees = run(gpu.OPS, truth, full=True, correct=0.9, num_speculative_tokens=8)
    assert llm.engine.target.attention._ops["paged_attention"] is gpu.OPS["paged_attention"]
    assert isinstance(llm.engine.target.decoder.run, FusedLayers)
    assert token_ids == plain
    assert counter(llm, "num_draft_tokens") > counter(llm, "num_accepted_tokens") > 2
    _, _, expected = run(REFERENCE, {}, max_depth=0)
    for i, prompt in enumerate(prompts):
        n = len(prompt) + NUM_TOKENS - 1  # the last token was computed in neither run, or in one alone
        assert torch.equal(features[i][:n], features_with_trees[i][:n])
        torch.testing.assert_close(features[i][: len(prompt)], expected[i][: len(prompt)], rtol=1e-4, atol=1e-4)
