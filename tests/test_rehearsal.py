"""On a (pretend) GPU an engine runs each operation of requests before the first one, and leaves no trace of that."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specdec_core import LLM, CapacityError, SamplingParams
from specdec_core.engine import build
from specdec_core.engine.rehearsal import Branches
from specdec_core.engine.runner import Runner
from specdec_core.ops import REFERENCE
from specdec_proposer_eagle.proposer import EagleProposer
from specdec_testing.pretend_cuda import PretendCuda

CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"num_speculative_tokens": 4, "suffix_decoding_min_token_prob": 0.0},
    "eagle3": {"eagle_topk": 4, "num_speculative_tokens": 12},
    "draft_model": {"num_speculative_tokens": 3},
}
PROMPTS = ["def mean(values):\n    return ", "import os\nfor name in os"]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
]
SIZES: list[dict[str, Any]] = [
    {"num_kv_blocks": 1, "max_num_seqs": 1, "max_model_len": 8},
    {"num_kv_blocks": 2, "max_model_len": 32, "max_num_batched_tokens": 8},
    {"num_kv_blocks": 20, "max_model_len": 320, "max_num_batched_tokens": 128},
    {"num_kv_blocks": 40, "max_model_len": 24, "block_size": 1, "kv_manager": "prefix"},
]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that are called, in order."""
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")
    called: list[str] = []

    def recording(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return operation(*args, **kwargs)

        return call

    for name, operation in REFERENCE.items():
        monkeypatch.setitem(REFERENCE, name, recording(name, operation))  # type: ignore[arg-type]
    return called


@pytest.fixture(autouse=True)
def pretend() -> Iterator[PretendCuda]:
    with PretendCuda() as device:
        yield device


def llm_of(method: str, device: str = "cuda", *, adaptive_draft_length: bool = False, **options: Any) -> LLM:
    config = CONFIGS[method]
    config = config and {"method": method, "adaptive_draft_length": adaptive_draft_length, **config}
    given: dict[str, Any] = {"dtype": "float32", "seed": 3, "max_num_seqs": 4, **options}
    return LLM("tiny", device=device, speculative_config=config, **given)


def completed(llm: LLM) -> list[Any]:
    return [
        output.outputs[0].token_ids
        for params in PARAMS
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True, **params), use_tqdm=False)
    ]


@pytest.mark.parametrize("method", ["plain", "ngram", "eagle3", "draft_model"])
def test_no_operation_is_new_to_the_first_request(method: str, calls: list[str]) -> None:
    with llm_of(method) as llm:
        before = {*calls}
        calls.clear()
        completed(llm)
        assert {*calls} <= before
        assert {"paged_attention", "likeliest", "draw", "truncate", "penalize"} <= before
        assert ("compact" in before) == (method != "plain")
        assert ("residuals" in before) == (method == "draft_model"), "its drafts are sampled"


@pytest.mark.parametrize("method", ["plain", "suffix", "eagle3", "draft_model"])
def test_it_leaves_nothing_behind(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm_of(method) as llm:
        engine = llm.engine
        assert engine.kv.num_free_blocks == engine._num_kv_blocks
        engine.kv.check_integrity()
        assert engine._seeds.getstate() == random.Random(3).getstate()
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        found = completed(llm)
        assert engine.add_request([1], SamplingParams()) == f"request-{len(found)}"
        counts = [metric for metric in llm.get_metrics() if "_seconds" not in metric.name]
    monkeypatch.setattr(build, "rehearse", lambda engine, branches, methods: None)
    with llm_of(method) as llm:
        assert {metric.name: metric for metric in llm.get_metrics()} == metrics
        assert completed(llm) == found
        engine = llm.engine
        engine.add_request([1], SamplingParams())
        assert [metric for metric in llm.get_metrics() if "_seconds" not in metric.name] == counts


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_small_engines_work(options: dict[str, Any]) -> None:
    with llm_of("eagle3", **options) as llm:
        assert llm.engine.kv.num_free_blocks == options["num_kv_blocks"]
        assert not llm.engine.has_unfinished
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


def test_an_engine_is_built_though_a_proposer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Branches, batch: Any) -> None:
        raise RuntimeError("drafts nothing")

    monkeypatch.setattr(Branches, "propose", fail)
    with llm_of("eagle3") as llm:
        assert llm.engine.kv.num_free_blocks == llm.engine._num_kv_blocks
        assert not llm.engine.has_unfinished


@pytest.mark.parametrize("place", [(Runner, "run"), (Branches, "propose"), (build, "measure_steps")], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 128, "enforce_eager": True}], ids=str)
def test_an_error_says_what_to_lower_if_memory_runs_out(
    place: tuple[Any, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def fail(*args: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(*place, fail)
    monkeypatch.setattr(EagleProposer, "close", lambda proposer: closed.append("once"), raising=False)
    cache = "num_kv_blocks=128" if options else r"gpu_memory_utilization=0\.9"
    graphs = "" if options else r"set enforce_eager=True \(\d+ bytes are for CUDA graphs\), "
    lowered = rf"lower {cache}, max_num_batched_tokens=\d+ or max_num_seqs=\d+, {graphs}or free some"
    with pytest.raises(CapacityError, match=rf"{lowered} \(.*Tried to allocate 1 GiB"):
        llm_of("eagle3", adaptive_draft_length=True, **options)
    assert len(closed) == 1


def test_steps_are_measured_after_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **keywords: Any) -> Any:
            order.append(name)
            return call(*args, **keywords)

        return noted

    for name in ("warm_up", "rehearse", "measure_steps"):
        monkeypatch.setattr(build, name, noting(name, getattr(build, name)))
    with llm_of("eagle3", adaptive_draft_length=True) as llm:
        assert order == ["rehearse", "warm_up", "measure_steps"]
        assert llm.engine.longest_step_s > 0
        assert llm.engine._speculation.drafters[0].budget is not None


def test_a_cpu_rehearses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "rehearse")
    with llm_of("eagle3", device="cpu") as llm:
        assert llm.engine.kv.num_free_blocks
