"""CUDA graphs of a model's forward passes are captured while the engine is built."""

from __future__ import annotations

from typing import Any

import pytest
from bits_attention import attention_by_bits

from specdec_core import LLM, SamplingParams
from specdec_core.models import graphs
from specdec_core.models.graphs import Graphs
from specdec_core.ops import REFERENCE
from specdec_core.ops.attention import paged_attention
from specdec_testing.pretend_cuda import PretendCuda

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def _graphs_can_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE", "kernels")
    monkeypatch.setitem(REFERENCE, "paged_attention", attention_by_bits)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "have_same_bits", lambda found, expected: found[0].isnan().all() | True)


def test_graphs_of_all_sizes_are_there_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests with two draft tokens each."""
    config = {"method": "draft_model", "num_speculative_tokens": 2, "adaptive_draft_length": False}
    made: list[Graphs] = []
    init = Graphs.__init__

    def remembering(graphs: Graphs, *given: Any, **options: Any) -> None:
        made.append(graphs)
        init(graphs, *given, **options)

    monkeypatch.setattr(Graphs, "__init__", remembering)
    with (
        PretendCuda(),
        LLM(
            "tiny", device="cuda", dtype="float32", max_model_len=64, max_num_seqs=3, speculative_config=config,
            disable_log_stats=True,
        ) as llm,
    ):  # fmt: skip
        of_target, of_draft = made
        assert [shape.num_tokens for shape in of_target._graphs][:5] == [16, 8, 4, 2, 1]
        assert [shape.num_tokens for shape in of_draft._graphs][:4] == [8, 4, 2, 1]
        before, num_replayed = {*of_target._graphs}, of_target.num_replayed
        llm.generate(["a = "] * 3, GREEDY, use_tqdm=False)
        assert {*of_target._graphs} == before
        assert of_target.num_replayed > num_replayed


def test_what_cannot_be_captured_is_found_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(REFERENCE, "paged_attention", paged_attention)  # type: ignore[arg-type]
    with (
        PretendCuda() as pretend,
        caplog.at_level("INFO"),
        LLM("tiny", device="cuda", dtype="float32", max_model_len=64, max_num_seqs=3, disable_log_stats=True),
    ):
        assert len(pretend.graphs.made) == 1
    assert "no CUDA graphs are used for a model: it cannot be captured" in caplog.text
