"""Scripts for vLLM run with only the import and the model changed, and mean the same."""

from __future__ import annotations

import pytest

from specdec_core import LLM, SamplingParams

METRICS_SCRIPT = """
from specdec_core import LLM, SamplingParams

prompts = ["def mean(values):\\n", "class Stack:\\n    def __init__(self):\\n"]
sampling_params = SamplingParams(temperature=0, max_tokens=32)

llm = LLM(
    model="tiny",
    speculative_config={
        "method": "eagle",
        "num_speculative_tokens": 3,
    },
)
outputs = llm.generate(prompts, sampling_params)

num_drafts = 0
num_draft_tokens = 0
num_accepted_tokens = 0
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        num_accepted_tokens += metric.value

if num_drafts > 0:
    print(f"num_drafts: {num_drafts}")
    print(f"num_accepted_tokens: {num_accepted_tokens}")
    print(f"mean acceptance length: {1 + num_accepted_tokens / num_drafts:.2f}")
"""


def test_the_script_that_reads_metrics_prints_its_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script: dict[str, object] = {}
    exec(compile(METRICS_SCRIPT, "metrics_script.py", "exec"), script)
    drafts, accepted, length = (line.partition(": ") for line in capsys.readouterr().out.splitlines())
    counts = [output.speculation for output in script["outputs"]]
    num_drafts, num_accepted = sum(each.num_drafts for each in counts), sum(each.num_accepted for each in counts)
    assert (drafts[0], int(drafts[2])) == ("num_drafts", num_drafts)
    assert (accepted[0], int(accepted[2])) == ("num_accepted_tokens", num_accepted)
    assert (length[0], length[2]) == ("mean acceptance length", f"{1 + num_accepted / num_drafts:.2f}")
    assert 0 < num_accepted < script["num_draft_tokens"]


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
