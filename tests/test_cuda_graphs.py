"""Forward passes, and levels of draft heads, are replayed as CUDA graphs, on a pretend GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bits_attention import attention_by_bits

from specdec_core import LLM, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_core.engine import build, measuring
from specdec_core.engine.warm_up import RUNS
from specdec_core.models import graph_memory, graphs as module
from specdec_core.models.graphed import ForwardGraphs
from specdec_core.models.graphs import Graphs
from specdec_core.ops import REFERENCE
from specdec_core.ops.attention import paged_attention
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_proposer_eagle.proposer import EagleProposer
from specdec_proposer_medusa.module import MedusaHeads
from specdec_testing.pretend_cuda import PretendCuda

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "eagle": {"eagle_topk": 1, "num_speculative_tokens": 3},
    "eagle3": {"eagle_topk": 4, "num_speculative_tokens": 12},
    "mtp": {"num_speculative_tokens": 3},
    "mlp_speculator": {},
    "medusa": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"},
    "draft_model": {"num_speculative_tokens": 3},
}
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3}
HEADS = ["eagle", "eagle3", "mtp", "mlp_speculator", "medusa"]
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
    """A CPU's matrix products sum in other orders for other numbers of rows, which shows in the last bits of a tensor's
    largest numbers."""

    def are_close(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b).abs() <= 1e-5 * b.abs().amax()).all() if b.numel() else torch.tensor(True, device=b.device)

    return torch.stack([are_close(a, b) for a, b in zip(found, expected, strict=True)]).all()


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")
    monkeypatch.setitem(REFERENCE, "paged_attention", attention_by_bits)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "have_same_bits", roughly_the_same)


def decoded(
    device: str, method: str, temperature: float = 0.0, draft: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, list[Graphs], PretendCuda]:
    """The output tokens with the numbers of accepted ones, the graphs of the target and of the draft, and the pretend
    device. draft: further keys of the speculative_config."""
    config = METHODS[method]
    config = None if config is None else {"method": method, "adaptive_draft_length": False, **config, **(draft or {})}
    made: list[Graphs] = []
    init = Graphs.__init__

    def remembering(graphs: Graphs, *given: Any, **options: Any) -> None:
        made.append(graphs)
        init(graphs, *given, **options)

    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=8, ignore_eos=True) for seed in range(3)]
    with (
        pytest.MonkeyPatch.context() as patch,
        PretendCuda() as pretend,
    ):
        patch.setattr(Graphs, "__init__", remembering)
        with LLM(
            "tiny", device=device, dtype="float32", **SIZES, speculative_config=config, disable_log_stats=True,
            **options,
        ) as llm:  # fmt: skip
            outputs = [
                (output.outputs[0].token_ids, output.speculation)
                for _ in range(NUM_ROUNDS)
                for output in llm.generate(PROMPTS, params, use_tqdm=False)
            ]
    return outputs, made, pretend


@pytest.mark.parametrize(
    ("method", "temperature"), [("plain", 1.0), ("ngram", 1.0), *((each, 0.0) for each in ["draft_model", *HEADS])]
)
def test_most_passes_are_replayed_and_tokens_are_the_same(method: str, temperature: float) -> None:
    tokens, made, pretend = decoded("cuda", method, temperature)
    assert len(made) == (1 if method in ("plain", "ngram") else 2)
    for graphs in made:
        assert graphs.num_replayed >= 3
    replays = sum(graph.num_replays for graph in pretend.graphs.made)
    assert replays >= sum(graphs.num_replayed for graphs in made)
    for graphs, planned in zip(made, planned_for_buffers(method), strict=False):
        assert planned / 2 < graphs.pool.buffers.num_bytes <= planned
    assert tokens == decoded("cpu", method, temperature)[0]


def planned_for_buffers(method: str) -> tuple[int, int]:
    """Of the memory plan, what is for the inputs and results of the graphs of target and draft."""
    given = METHODS[method]
    config = None if given is None else {"method": method, **given}
    with pytest.MonkeyPatch.context() as patch, PretendCuda():
        for name in ("POOL_PARTS", "OBJECT_BYTES", "PARTIAL_BYTES"):
            patch.setattr(graph_memory, name, 0)
        of_target, of_both = (
            dry_run("tiny", device="cuda", dtype="float32", **SIZES, speculative_config=draft).memory.step.graph_bytes
            for draft in (config if given is None else config | {"enforce_eager": True}, config)
        )
    return of_target, of_both - of_target


def test_sampled_drafts_of_a_head_are_the_same() -> None:
    tokens, (_, of_head), _ = decoded("cuda", "mlp_speculator", 1.0, {"draft_sample_method": "probabilistic"})
    assert of_head.num_replayed >= 3
    assert tokens == decoded("cpu", "mlp_speculator", 1.0, {"draft_sample_method": "probabilistic"})[0]


@pytest.mark.parametrize("method", ["ngram", "draft_model", *HEADS])
def test_eager_passes_have_no_graphs(method: str) -> None:
    tokens, made, pretend = decoded("cuda", method, enforce_eager=True)
    assert not made
    assert not pretend.graphs.made
    assert tokens == decoded("cpu", method)[0]


def test_a_head_may_be_eager_alone() -> None:
    _, made, _ = decoded("cuda", "medusa", draft={"enforce_eager": True})
    assert [graphs.num_replayed > 0 for graphs in made] == [True]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_without_graphs_only_the_heads_run_that_a_draft_needs(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[int] = set()
    compute = MedusaHeads.hidden

    def noting(heads: MedusaHeads, i: int, hidden: torch.Tensor) -> torch.Tensor:
        ran.add(i)
        return compute(heads, i, hidden)

    monkeypatch.setattr(MedusaHeads, "hidden", noting)
    config = {"method": "medusa", "adaptive_draft_length": False, **(METHODS["medusa"] or {})}
    with (
        PretendCuda(),
        LLM(
            "tiny", device="cuda", dtype="float32", max_model_len=64, speculative_config=config,
            enforce_eager=enforce_eager,
        ) as llm,
    ):  # fmt: skip
        ran.clear()
        llm.generate(PROMPTS, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
    assert ran == ({0} if enforce_eager else {0, 1}), "the drafts have one token, and the graph is of both heads"


def test_a_head_that_does_not_ask_for_graphs_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleProposer, "run_is_pure", False)
    found, made, _ = decoded("cuda", "eagle")
    assert [graphs.num_replayed > 0 for graphs in made] == [True]
    assert found == decoded("cpu", "eagle")[0]


@pytest.mark.parametrize("method", ["draft_model", *HEADS])
def test_memory_is_planned_for_the_graphs_that_there_are(method: str) -> None:
    config = {"method": method, **(METHODS[method] or {})}
    drafts = [None, config | {"enforce_eager": True}, config]
    with PretendCuda():
        plans = [dry_run("tiny", device="cuda", dtype="float32", speculative_config=draft).memory for draft in drafts]
    of_target, of_eager_draft, of_both = (plan.step.graph_bytes for plan in plans)
    assert of_both > of_eager_draft >= of_target > 0  # drafts make the target keep hidden states


def test_what_is_timed_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []  # of the target, whether a graph replayed it
    timed: list[list[bool]] = []
    forward, decoding, warm_up = ForwardGraphs.forward, measuring._decoding, build.warm_up

    def noting(graphs: ForwardGraphs, *args: Any) -> Any:
        before = graphs.graphs.num_replayed
        result = forward(graphs, *args)
        passes.append(graphs.graphs.num_replayed > before)
        return result

    def warming_up(*args: Any) -> float:
        token_s = warm_up(*args)
        timed.append(passes[-RUNS:])
        return token_s

    @contextmanager
    def measured(*args: Any) -> Iterator[Any]:
        with decoding(*args) as decode:
            yield decode
            timed.append(passes[-1 - measuring.NUM_TIMED :])

    monkeypatch.setattr(ForwardGraphs, "forward", noting)
    monkeypatch.setattr(build, "warm_up", warming_up)
    monkeypatch.setattr(measuring, "_decoding", measured)
    monkeypatch.setattr(measuring, "LONGEST_S", 1e9)
    config = {"method": "ngram", "num_speculative_tokens": 2, "adaptive_draft_length": True}
    with PretendCuda():
        LLM("tiny", device="cuda", dtype="float32", max_model_len=64, speculative_config=config, max_num_seqs=1).close()
    assert len(timed) == 1 + 3 * measuring.NUM_ROUNDS
    assert all(map(all, timed))


def test_operations_that_read_the_host_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "paged_attention", paged_attention)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        tokens, made, _ = decoded("cuda", "eagle3")
    assert [graphs.num_replayed for graphs in made] == [0, 0]
    for what in ("a model", "the draft head of 'eagle3'"):
        assert f"for {what}: it cannot be captured: starts and lengths of requests were read" in caplog.text
    assert tokens == decoded("cpu", "eagle3")[0]


def test_a_graph_that_repeats_a_number_of_the_host_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "paged_attention", reading_the_host)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        tokens, (graphs,), _ = decoded("cuda", "plain")
    assert graphs.num_replayed == 0
    assert "gave other results" in caplog.text
    assert tokens == decoded("cpu", "plain")[0]
