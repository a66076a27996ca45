"""The proposer's own metrics: how often it looked for a match, and how often there was one."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_core import LLM, SamplingParams
from specdec_testing import tiny_target

PREFIX = "vllm:spec_decode_ngram_"
CONFIG = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(("prompt", "hits"), [([1, 2, 3, 1, 2], 1), ([1, 2, 3, 4, 5], 0)])
def test_matches_are_counted(prompt: list[int], hits: int, tmp_path: Path) -> None:
    """A bias of logits lets the model go on with one token, so that only the step after the prompt drafts.
    The first prompt's last two tokens then have an earlier occurrence."""
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={prompt[2]: 100.0}, ignore_eos=True)
    with LLM(tiny_target(tmp_path), skip_tokenizer_init=True, speculative_config=CONFIG) as llm:
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        metrics = {metric.name.removeprefix(PREFIX): metric.value for metric in llm.get_metrics()}
    assert (metrics["queries"], metrics["hits"]) == (1, hits)
