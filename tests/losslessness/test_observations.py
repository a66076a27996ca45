"""The hidden states that a proposer observes equal those that transformers computes for prompt and output, with draft
trees and with chunked prefill."""

from __future__ import annotations

from typing import Any

import random_tree
import reference
import torch
from reference import NUM_TOKENS


def test_features_of_accepted_tokens(
    model_dir: Any, target: Any, prompts: list, references: list, make_llm: Any, generate: Any
) -> None:
    """The observed hidden states after the final norm equal those of transformers. The proposer RandomTree itself
    checks tokens and positions."""
    from specdec_core import SamplingParams

    random_tree.TRUTH.update(zip(map(tuple, prompts), references, strict=True))
    llm = make_llm(model_dir, "random_tree", options={"keep_features": True}, max_num_batched_tokens=48)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(requests, params, use_tqdm=False)
    assert any(drafted.num_right > 1 for drafted in random_tree.DRAFTED)
    assert len(random_tree.FEATURES) == len(prompts)
    for output, prompt, expected in zip(outputs, prompts, references, strict=True):
        assert output.outputs[0].token_ids == expected
        seen = torch.cat(random_tree.FEATURES[output.request_id])
        states = reference.final_hidden_states(target, prompt + expected)
        num_seen = min(len(seen), len(prompt) + len(expected) - 1)  # a last path may run past the end
        assert num_seen >= len(prompt)
        torch.testing.assert_close(seen[:num_seen].float(), states[:num_seen], atol=2e-3, rtol=2e-3)


def test_every_request_is_finished_once_and_with_its_reason(
    model_dir: Any, prompts: list, make_llm: Any, generate: Any
) -> None:
    from specdec_core import SamplingParams

    llm = make_llm(model_dir, "random_tree")
    outputs = generate(llm, prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert [output.finish_reason for output in outputs] == ["length"] * len(prompts)
    assert list(random_tree.FINISHED.values()) == ["length"] * len(prompts)
