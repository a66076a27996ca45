"""How often the host waits for a (pretend) GPU in a step, for each method, and that it decodes the same tokens there.

A wait costs what all later work of the host costs, since the GPU then has nothing to do. A step of plain decoding waits
for its tokens. A step with a draft of a head or draft model waits for the draft, too.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from specdec_core import LLM, SamplingParams
from specdec_core.ops import REFERENCE
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_testing.pretend_cuda import PretendCuda

layout_of = import_module("specdec_kernels.gpu.pass_layout").layout_of if find_spec("triton") else None

ON_HOST = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"num_speculative_tokens": 4, "suffix_decoding_min_token_prob": 0.0},
}
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"
ON_DEVICE = {
    "draft_model": {"num_speculative_tokens": 3},
    "eagle": {"eagle_topk": 1, "num_speculative_tokens": 3},
    "eagle3": {"eagle_topk": 4, "num_speculative_tokens": 12},
    "mtp": {"num_speculative_tokens": 3},
    "mlp_speculator": {},
    "medusa": {"speculative_token_tree": TREE},
}
PROMPTS = ["def mean(values):\n    return ", "class Stack:\n    def __init__(self):\n", "import os\nfor name in os"]
NUM_TOKENS = 32


@pytest.fixture(autouse=True)
def _as_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads everything that kernels read of a forward pass, then is computed by the reference: kernels need a
    real GPU."""
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")
    monkeypatch.setitem(REFERENCE, "paged_attention", reading_as_kernels_do)  # type: ignore[arg-type]


def reading_as_kernels_do(query: Any, keys: Any, values: Any, plan: AttentionPlan, *more: Any, **features: Any) -> Any:
    assert len(plan.token_requests) == len(plan.prefix_lens) == len(plan.ancestors)
    assert len(plan.context_lens) == len(plan.tree_start) == len(plan.block_tables)
    if layout_of is not None:
        layout_of(plan, 16)
    return paged_attention(query, keys, values, plan, *more, **features)


def decoded(device: str, config: dict[str, Any] | None, params: list[SamplingParams]) -> Any:
    """The output tokens of each request, and the numbers of waits of decode steps in which there was a draft, or of all
    in plain decoding."""
    counts: list[int] = []
    with (
        PretendCuda() as pretend,
        LLM(
            "tiny", device=device, dtype="float32", max_num_seqs=len(params), speculative_config=config,
            disable_log_stats=True,
        ) as llm,
    ):  # fmt: skip
        engine, tokenizer = llm.engine, llm.get_tokenizer()
        ids = [engine.add_request(tokenizer.encode(PROMPTS[i % 3]), each) for i, each in enumerate(params)]
        requests = [engine._requests[each] for each in ids]
        while engine.has_unfinished:
            before = len(pretend.waits)
            report = engine.step()
            if not report.num_prefill_tokens and (report.num_draft_tokens or config is None):
                counts.append(len(pretend.waits) - before)
        tokens = [request.token_ids[request.num_prompt_tokens :].tolist() for request in requests]
    return tokens, counts


def doubled(logits: Any, token_ids: Any) -> Any:
    return 2 * logits


PARAMETERS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "masks": {"logit_bias": {5: 1.0}, "min_tokens": 9, "stop_token_ids": [7], "bad_words": ["self"]},
    "processors": {"logits_processors": [doubled]},
    "grammar": {"structured_outputs": {"regex": "[a-z]+(, [a-z_]+){30}"}, "ignore_eos": False},
    "truncation": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
}
PARAMETERS["all without a wait"] = PARAMETERS["penalties"] | PARAMETERS["masks"] | PARAMETERS["truncation"]
PARAMETERS["penalties and processors"] = PARAMETERS["penalties"] | PARAMETERS["processors"]
PARAMETERS["logprobs and processors"] = PARAMETERS["logprobs"] | PARAMETERS["processors"]


@pytest.mark.parametrize("method", ["plain", "suffix", "eagle3"])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_sampling_parameters_wait_once_at_most(kind: str, method: str) -> None:
    config = None
    if method != "plain":
        config = {"method": method, "adaptive_draft_length": False, **(ON_HOST | ON_DEVICE)[method]}
    params = [
        SamplingParams(**{"temperature": 0.7, "seed": seed, "max_tokens": 16, "ignore_eos": True, **PARAMETERS[kind]})
        for seed in range(3)
    ]
    tokens, counts = decoded("cuda", config, params)
    assert len(counts) > 1
    assert max(counts) <= (2 if method in ON_DEVICE else 1) + ("logprobs" in PARAMETERS[kind])
    assert tokens == decoded("cpu", config, params)[0]


def test_several_methods_wait_no_more_than_one() -> None:
    config = {
        "method": [{"method": "suffix", **ON_HOST["suffix"]}, {"method": "eagle3", **ON_DEVICE["eagle3"]}],
        "adaptive_draft_length": False,
    }
    params = [SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)] * 3
    tokens, counts = decoded("cuda", config, params)
    assert len(counts) > 1
    assert max(counts) <= 2
    assert tokens == decoded("cpu", config, params)[0]


@pytest.mark.parametrize(("temperature", "is_seeded"), [(0.0, True), (1.0, True), (1.0, False)])
@pytest.mark.parametrize("number", [4, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", ["plain", *ON_HOST, *ON_DEVICE])
def test_a_step_waits_as_rarely_as_it_can(method: str, number: int, temperature: float, is_seeded: bool) -> None:
    config = None
    if method != "plain":
        config = {"method": method, "adaptive_draft_length": False, **(ON_HOST | ON_DEVICE)[method]}
    seeds = range(number) if is_seeded else [None] * number
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True) for seed in seeds
    ]
    tokens, counts = decoded("cuda", config, params)
    assert len(counts) > 1
    assert max(counts) <= (2 if method in ON_DEVICE else 1)
    if is_seeded:
        assert tokens == decoded("cpu", config, params)[0]
