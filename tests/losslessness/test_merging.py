"""Merging several drafts into one tree does not change outputs: they equal those of plain decoding."""

from __future__ import annotations

from typing import Any

import attrs
import merged_draft
import pytest
import random_tree
from reference import NUM_TOKENS


@pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_equals_that_without_speculation(
    temperature: float, model_dir: Any, make_llm: Any, prompts: list, generate: Any, counter: Any
) -> None:
    from specdec_core import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    each = [attrs.evolve(params, seed=i) for i in range(len(prompts))]
    expected = [output.token_ids for output in generate(make_llm(model_dir, None), prompts, each)]
    random_tree.TRUTH.update(zip(map(tuple, prompts), expected, strict=True))
    merged_draft.NUM_MERGED[:] = 0, 0
    llm = make_llm(model_dir, "merged", options={"correct": 0.9})
    assert [output.token_ids for output in generate(llm, prompts, each)] == expected
    drafted, left = merged_draft.NUM_MERGED
    assert drafted - left > 50, "hardly anything was merged or cut"
    drafted, accepted = counter(llm, "num_draft_tokens"), counter(llm, "num_accepted_tokens")
    assert drafted - accepted > 50
    assert accepted > 50
