"""Runs scripts of vLLM's documentation. Only the import and the models' names are changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import write_checkpoint
from lasting_ranks import lasting_ranks

from specdec_core import ConfigError
from specdec_model_tiny import model_path

HIDDEN_SIZE, VOCAB_SIZE, N_PREDICT = 256, 8192, 3  # of the embedded model; of the speculator below

NGRAM = """
from vllm import LLM, SamplingParams

prompts = ["The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""

METRICS = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    speculative_config={
        "method": "eagle",
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "num_speculative_tokens": 3,
    },
    disable_log_stats=False,
)
outputs = llm.generate(["def mean(values):", "class Stack:"], SamplingParams(temperature=0, max_tokens=32))

num_drafts = num_draft_tokens = num_accepted_tokens = 0
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

EAGLE3 = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "method": "eagle3",
        "model": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    },
)
for output in llm.generate(["import os"], SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""

MTP = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/a-target-with-an-mtp-module",
    tensor_parallel_size=1,
    speculative_config={"method": "mtp", "num_speculative_tokens": 1},
)
for output in llm.generate(["import os"], SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""

MLP_SPECULATOR = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "ibm-ai-platform/llama3-70b-accelerator",
        "draft_tensor_parallel_size": 1,
    },
)
for output in llm.generate(["import os"], SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""

SUFFIX = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 32,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
)
for output in llm.generate(["import os"], SamplingParams(temperature=0, max_tokens=32)):
    print(output.outputs[0].text)
"""

BATCHES = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "eagle3",
        "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "num_speculative_tokens": 3,
        "disable_by_batch_size": 8,
    },
)
prompts = [f"def function_{i}(" for i in range(10)]
for output in llm.generate(prompts, SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
"""

HIGH_THROUGHPUT = """
from vllm import LLM

llm = LLM("meta-llama/Llama-3.1-8B-Instruct", speculative_config={
    "method": "eagle",
    "num_speculative_tokens": 5,
    "disable_by_batch_size": 16,
    "disable_padded_drafter_batch": False,
})
print(llm.generate("import os")[0].outputs[0].text)
"""

LOW_LATENCY = """
from vllm import LLM

llm = LLM("meta-llama/Llama-3.1-8B-Instruct", speculative_config={
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 3,
})
print(llm.generate("import os")[0].outputs[0].text)
"""

BALANCED = """
from vllm import LLM

llm = LLM("meta-llama/Llama-3.1-8B-Instruct", speculative_config={
    "method": "suffix",
    "num_speculative_tokens": 24,
    "suffix_decoding_max_spec_factor": 0.5,
    "suffix_decoding_min_token_prob": 0.2,
})
print(llm.generate("import os")[0].outputs[0].text)
"""

CHAIN_AS_TREE = """
from vllm import LLM

num_speculative_tokens = 3
llm = LLM("meta-llama/Llama-3.1-8B-Instruct", speculative_config={
    "method": "eagle",
    "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    "num_speculative_tokens": num_speculative_tokens,
    "speculative_token_tree": str([(i + 1) * (0,) for i in range(num_speculative_tokens)]),
})
print(llm.generate("import os")[0].outputs[0].text)
"""

OLD_DRAFT_MODEL = """
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-6.7b", speculative_model="facebook/opt-125m", num_speculative_tokens=5)
for output in llm.generate("The future of AI is", SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""

OLD_NGRAM = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="facebook/opt-6.7b",
    speculative_model="[ngram]",
    num_speculative_tokens=5,
    ngram_prompt_lookup_max=4,
    ngram_prompt_lookup_min=1,
)
for output in llm.generate("The future of AI is", SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""

OLD_SPECULATOR = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_model="ibm-fms/llama3-70b-accelerator",
    speculative_draft_tensor_parallel_size=1,
)
for output in llm.generate("The future of AI is", SamplingParams(temperature=0.8, top_p=0.95)):
    print(output.outputs[0].text)
"""


@pytest.fixture(scope="module")
def speculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MLP speculator for the embedded model, as IBM publishes them."""
    sizes = {"vocab_size": VOCAB_SIZE, "emb_dim": HIDDEN_SIZE, "inner_dim": 32, "n_predict": N_PREDICT}
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], **sizes}
    tensors = {}
    for i in range(N_PREDICT):
        tensors[f"speculator.emb.{i}.weight"] = torch.randn(VOCAB_SIZE, 32)
        tensors[f"speculator.head.{i}.weight"] = torch.randn(VOCAB_SIZE, 32)
        tensors[f"speculator.proj.{i}.weight"] = torch.randn(32, HIDDEN_SIZE if i == 0 else 32)
        tensors |= {f"speculator.ln.{i}.{kind}": torch.ones(32) for kind in ("weight", "bias")}
    return write_checkpoint(tmp_path_factory.mktemp("speculator"), config, tensors)


def run(script: str, drafts: Mapping[str, Path | str]) -> dict[str, Any]:
    """Run a script with specdec in place of vLLM, the embedded model as the target, and other drafts. Returns the
    script's variables.

    drafts: folders or names of drafts, by the start of their names in the script.
    """
    script = script.replace("from vllm import", "from specdec_core import")
    for name, found in drafts.items():
        script = re.sub(rf'"{re.escape(name)}[^"]*"', repr(str(found)), script)
    script = re.sub(r'"(facebook|meta-llama)/[^"]*"', '"tiny"', script)
    variables: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(script, "<example>", "exec"), variables)
    finally:
        if "llm" in variables:
            variables["llm"].close()
    return variables


SHIPPED = model_path() / "drafts"
HEADS = {"yuhuili/EAGLE3": SHIPPED / "eagle3", "yuhuili/EAGLE-": SHIPPED / "eagle"}
SCRIPTS = {
    "ngram": NGRAM,
    "eagle3": EAGLE3,
    "suffix": SUFFIX,
    "mtp": MTP,
    "batches": BATCHES,
    "high throughput": HIGH_THROUGHPUT,
    "low latency": LOW_LATENCY,
    "balanced": BALANCED,
    "chain as a tree": CHAIN_AS_TREE,
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """The scripts with several ranks use the same processes."""
    with lasting_ranks():
        yield


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_and_prints_its_texts(script, capsys):
    run(script, HEADS)
    assert capsys.readouterr().out.strip()


def test_three_ranks_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 is not supported: give 1, 2 or 4"):
        run(EAGLE3.replace("tensor_parallel_size=4", "tensor_parallel_size=3"), HEADS)


def test_the_script_that_reads_metrics_prints_its_three_lines(capsys):
    counts = [output.speculation for output in run(METRICS, HEADS)["outputs"]]
    num_drafts, num_accepted = sum(each.num_drafts for each in counts), sum(each.num_accepted for each in counts)
    assert capsys.readouterr().out.splitlines() == [
        f"num_drafts: {num_drafts}",
        f"num_accepted_tokens: {num_accepted}",
        f"mean acceptance length: {1 + num_accepted / num_drafts:.2f}",
    ]
    assert num_accepted > 0


def test_a_speculator_tells_method_and_number(speculator, capsys):
    config = run(MLP_SPECULATOR, {"ibm-ai-platform/": speculator})["llm"].speculative_config
    assert (config.method, config.num_speculative_tokens) == ("mlp_speculator", N_PREDICT)
    assert capsys.readouterr().out.strip()


OLD_SCRIPTS = {
    "draft model": (OLD_DRAFT_MODEL, "facebook/opt-125m"),
    "ngram": (OLD_NGRAM, None),
    "speculator": (OLD_SPECULATOR, "ibm-fms/"),
}


@pytest.mark.parametrize(("script", "draft"), OLD_SCRIPTS.values(), ids=OLD_SCRIPTS)
def test_old_keywords_run_with_one_warning(script, draft, speculator, capsys):
    drafts = {draft: speculator if draft == "ibm-fms/" else SHIPPED / "draft_model"} if draft else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(script, drafts)
    assert capsys.readouterr().out.strip()
    assert [each.category for each in caught] == [DeprecationWarning]
