"""Scripts for vLLM run with only the import and the model changed, and mean the same."""

from __future__ import annotations

import pytest

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
