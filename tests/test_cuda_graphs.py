"""A target's and a draft model's forward passes are replayed as CUDA graphs, on a pretend GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from bits_attention import attention_by_bits

from specdec_core import LLM, SamplingParams
from specdec_core.models import graphs as module
from specdec_core.models.graphed import ForwardGraphs
from specdec_core.ops import REFERENCE
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_testing.pretend_cuda import PretendCuda

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "eagle3": {"eagle_topk": 4, "num_speculative_tokens": 12},
    "draft_model": {"num_speculative_tokens": 3},
}
NUM_ROUNDS = 4
"""In which the same prompts are decoded, so that forward passes have the same shapes."""
PROMPTS = ["def mean(values):\n    return ", "class Stack:\n    def __init__(self):\n", "import os\nfor name in os"]


def reading_the_host(query: Any, keys: Any, values: Any, plan: AttentionPlan, *more: Any, **features: Any) -> Any:
    """Lets tokens attend to as many slots as the host computes: a graph would repeat that number."""
    most = max(plan.metadata.starts) if not plan.is_fixed else reading_the_host.most
    reading_the_host.most = most
    return attention_by_bits(query, keys, values, plan, *more, **features) + 1e-3 * most


reading_the_host.most = 0


def roughly_the_same(found: Any, expected: Any) -> torch.Tensor:
    """A CPU's matrix products sum in other orders for other numbers of rows."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([torch.isclose(a, b, rtol=1e-4, atol=1e-4).all() for a, b in pairs]).all()


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")
    monkeypatch.setitem(REFERENCE, "paged_attention", attention_by_bits)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "have_same_bits", roughly_the_same)


def decoded(device: str, method: str, temperature: float = 0.0, **options: Any) -> tuple[Any, Any, PretendCuda]:
    """The output tokens, the target's and a draft model's ForwardGraphs, and the pretend device."""
    config = METHODS[method]
    config = None if config is None else {"method": method, "adaptive_draft_length": False, **config}
    made: list[ForwardGraphs] = []
    init = ForwardGraphs.__init__

    def remembering(graphs: ForwardGraphs, *given: Any) -> None:
        made.append(graphs)
        init(graphs, *given)

    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=8, ignore_eos=True) for seed in range(3)]
    with (
        pytest.MonkeyPatch.context() as patch,
        PretendCuda() as pretend,
    ):
        patch.setattr(ForwardGraphs, "__init__", remembering)
        with LLM(
            "tiny", device=device, dtype="float32", max_model_len=64, speculative_config=config,
            disable_log_stats=True, **options,
        ) as llm:  # fmt: skip
            outputs = [
                output.outputs[0].token_ids
                for _ in range(NUM_ROUNDS)
                for output in llm.generate(PROMPTS, params, use_tqdm=False)
            ]
    return outputs, made, pretend


@pytest.mark.parametrize(
    ("method", "temperature"), [("plain", 1.0), ("ngram", 1.0), ("eagle3", 0.0), ("draft_model", 0.0)]
)
def test_most_passes_are_replayed_and_tokens_are_the_same(method: str, temperature: float) -> None:
    tokens, made, pretend = decoded("cuda", method, temperature)
    assert len(made) == (2 if method == "draft_model" else 1)
    for graphs in made:
        assert graphs.graphs.num_replayed >= 3
    replays = sum(graph.num_replays for graph in pretend.graphs.made)
    assert replays >= sum(graphs.graphs.num_replayed for graphs in made)
    assert tokens == decoded("cpu", method, temperature)[0]


def test_eager_passes_have_no_graphs() -> None:
    tokens, made, pretend = decoded("cuda", "ngram", enforce_eager=True)
    assert not made
    assert not pretend.graphs.made
    assert tokens == decoded("cpu", "ngram")[0]


def test_operations_that_read_the_host_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "paged_attention", paged_attention)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        tokens, (graphs,), _ = decoded("cuda", "eagle3")
    assert graphs.graphs.num_replayed == 0
    assert "starts and lengths of requests were read" in caplog.text
    assert tokens == decoded("cpu", "eagle3")[0]


def test_a_graph_that_repeats_a_number_of_the_host_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "paged_attention", reading_the_host)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        tokens, (graphs,), _ = decoded("cuda", "plain")
    assert graphs.graphs.num_replayed == 0
    assert "gave other results" in caplog.text
    assert tokens == decoded("cpu", "plain")[0]
