"""The seed of `LLM`: two runs of a script give the same outputs."""

from __future__ import annotations

from specdec_core import LLM, SamplingParams


def sampled(**keywords: object) -> list[list[int]]:
    """The token ids of three requests without seeds of their own, two of them for the same prompt."""
    llm = LLM("tiny", max_model_len=64, **keywords)
    outputs = llm.generate(["import os\n", "def f(", "def f("], SamplingParams(temperature=1, max_tokens=12))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_two_runs_of_a_script_give_the_same_outputs_unless_the_seed_differs() -> None:
    first = sampled()
    assert first[1] != first[2], "requests of one run have seeds of their own"
    assert sampled() == first
    assert sampled(seed=0) == first
    assert sampled(seed=1) != first
    assert sampled(seed=None) != first
