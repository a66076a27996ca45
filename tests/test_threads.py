"""Engines in several threads of a process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from specdec_core import LLM, SamplingParams

CONFIGS: list[dict[str, Any] | None] = [None, {"method": "ngram"}, {"method": "draft_model"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_engines_may_be_built_in_several_threads() -> None:
    """Transformers sets defaults of the whole process while it builds a model."""
    barrier = Barrier(len(CONFIGS))

    def text_of(config: dict[str, Any] | None, dtype: str) -> str:
        barrier.wait()
        with LLM("tiny", dtype=dtype, max_model_len=64, max_num_seqs=2, speculative_config=config) as llm:
            return llm.generate("def mean(values):", GREEDY, use_tqdm=False)[0].outputs[0].text

    with ThreadPoolExecutor(len(CONFIGS)) as pool:
        for dtypes in (["float32"] * 3, ["float32", "bfloat16", "float32"]):
            first, second, third = pool.map(text_of, CONFIGS, dtypes)
            assert first == third
            assert second == first or dtypes[1] != "float32"
