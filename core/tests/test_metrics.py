"""The engine's counters, the draft counts of one request, and the line that the engine writes to the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specdec_core import Counter, DraftCounts, Gauge, PluginError, StepReport, Vector
from specdec_core.engine.metrics import Load, Metrics

REPORT = StepReport(
    num_prefill_tokens=9,
    num_prompt_tokens=7,
    num_output_tokens=6,
    num_draft_tokens=10,
    num_accepted=4,
    draft_s=0.5,
    target_s=2.0,
    verify_s=0.25,
    num_preempted=1,
    accepted_per_request={"a": 3, "b": 1, "c": 0},
    first_token_s=(0.25,),
    inter_token_s=(0.5, 1.0),
    whole_request_s=(4.0,),
)


def values(metrics: Metrics) -> dict[str, Any]:
    return {metric.name: metric.value for metric in metrics.read()}


def test_counters() -> None:
    metrics = Metrics(5, prefix="mine", log_interval_s=None)
    for _ in range(2):
        metrics.update(REPORT, 3.0)
    assert values(metrics) == {
        "mine:spec_decode_num_drafts": 6,
        "mine:spec_decode_num_draft_tokens": 20,
        "mine:spec_decode_num_accepted_tokens": 8,
        "mine:spec_decode_num_accepted_tokens_per_pos": [4, 2, 2, 0, 0],
        "mine:spec_decode_draft_seconds": 1.0,
        "mine:spec_decode_target_seconds": 4.0,
        "mine:spec_decode_forward_seconds": 3.5,
        "mine:spec_decode_verify_seconds": 0.5,
        "mine:spec_decode_other_seconds": 1.0,
        "mine:prompt_tokens": 14,
        "mine:generation_tokens": 12,
        "mine:num_preemptions": 2,
        "mine:prefix_cache_queries": 0,
        "mine:prefix_cache_hits": 0,
        "mine:step_seconds": 6.0,
        "mine:time_to_first_token_seconds": 0.25,
        "mine:inter_token_latency_seconds": 0.75,
        "mine:e2e_request_latency_seconds": 4.0,
    }
    (vector,) = (metric for metric in metrics.read() if isinstance(metric, Vector))
    assert vector.values == vector.value == [4, 2, 2, 0, 0]


def test_a_line_in_the_log_after_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(5)
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        for _ in range(3):
            metrics.update(REPORT, 3.0)
        assert not caplog.messages
        metrics.update(REPORT, 3.0)
        (line,) = caplog.messages
        for _ in range(3):
            metrics.update(StepReport(num_output_tokens=40), 3.0)
        assert len(caplog.messages) == 1, "the next ten seconds are not over"
        metrics.update(StepReport(num_output_tokens=40), 3.0)
    # 12 seconds: 40 draft tokens, 16 accepted in 12 drafts, 24 output tokens
    for words in (
        "specdec: 2.3 prompt and 2.0 output tokens/s",
        "drafted 3.3 and accepted 1.3 tokens/s",
        "acceptance rate 0.40, per position 0.67, 0.33, 0.33",
        "mean acceptance length 2.33",
        "2.00 s drafting, 7.00 s in forward passes, 1.00 s verifying, 2.00 s for the rest",
    ):
        assert words in line
    (line,) = caplog.messages[1:]
    assert line == (
        "specdec: 0.0 prompt and 13.3 output tokens/s; 0.00 s drafting, 0.00 s in forward passes, 0.00 s verifying, "
        "12.00 s for the rest"
    )


def test_the_line_in_the_log_has_the_load(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(5)
    load = Load(3, 2, 0.456, [Gauge("mine_cache_bytes", 12345), Counter("mine_cache_hits", 6)])
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        metrics.update(REPORT, 9.0, lambda: pytest.fail("there is no line yet"))
        metrics.update(REPORT, 9.0, lambda: load)
    (line,) = caplog.messages
    assert line.endswith(
        "; 3 running and 2 waiting requests, 46% of the KV cache in use, mine_cache_bytes 12,345, mine_cache_hits 6"
    )


def test_a_proposers_mistake_in_its_metrics_does_not_end_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(5)

    def load() -> Load:
        raise PluginError("mine: metrics failed")

    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        metrics.update(REPORT, 10.0, load)
    warning, line = caplog.messages
    assert warning == "specdec: mine: metrics failed"
    assert "tokens/s" in line


def test_the_last_line_has_the_totals(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(5)
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        for _ in range(5):
            metrics.update(REPORT, 3.0)
        caplog.clear()
        metrics.close()
    (line,) = caplog.messages
    assert line == (
        "specdec: closed after 35 prompt and 30 output tokens in 15.0 s of steps; 15 drafts, 20 of 50 tokens accepted; "
        "acceptance rate 0.40, per position 0.67, 0.33, 0.33; mean acceptance length 2.33; 2.50 s drafting, 8.75 s in "
        "forward passes, 1.25 s verifying, 2.50 s for the rest"
    )


def test_the_last_line_of_plain_decoding_and_of_no_work(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec_core.engine.metrics"):
        Metrics(0).close()
        assert not caplog.messages
        plain = Metrics(0, prefix="mine")
        plain.update(StepReport(num_output_tokens=1), 0.5)
        plain.close()
    (line,) = caplog.messages
    assert line == (
        "specdec: closed after 0 prompt and 1 output tokens in 0.5 s of steps; 0.00 s drafting, 0.00 s in forward "
        "passes, 0.00 s verifying, 0.50 s for the rest"
    )


def test_no_line_if_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(5, log_interval_s=None)
    with caplog.at_level(logging.INFO):
        metrics.update(REPORT, 1000.0)
        metrics.close()
    assert not caplog.messages


DRAFTS = st.lists(st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=20)


def counted(drafts: list[tuple[int, int]]) -> DraftCounts:
    counts = DraftCounts()
    for num_draft_tokens, num_accepted in drafts:
        counts.add(num_draft_tokens, num_accepted)
    return counts


@given(DRAFTS, DRAFTS)
def test_figures_of_a_request(drafts: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    counts = counted(drafts)
    lengths = [num_accepted for _, num_accepted in drafts]
    assert counts.num_drafts == len(drafts)
    assert counts.accepted_per_pos == [sum(n > i for n in lengths) for i in range(max(lengths, default=0))]
    assert sum(counts.accepted_per_pos) == counts.num_accepted == sum(lengths)
    if drafts:
        assert counts.acceptance_length == pytest.approx(1 + sum(counts.acceptance_rate_per_pos))
    assert counts + counted(others) == counted(drafts + others)
    assert counted([]).acceptance_length == 1.0
    assert counted([]).acceptance_rate == 0.0
