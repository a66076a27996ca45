"""The warning that drafting is a loss, where the number of draft tokens is fixed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from good_proposers import NoOptions, offer

from specdec_core import LLM, Draft, Plugins, Proposer, SamplingParams, StepReport, hookimpl
from specdec_core.engine import step_report
from specdec_core.engine.loss_watch import NUM_BETWEEN, NUM_PLAIN, NUM_STEPS, LossWatch
from specdec_testing import tiny_target

WARNING = "drafting is a loss here"


class Clock:
    """The engine's time: it passes while it is asked for and while `Wrong` drafts, however busy the machine is."""

    now = 0.0

    def __call__(self) -> float:
        Clock.now += 0.001
        return Clock.now


class Wrong(Proposer):
    """Drafts a token that is hardly ever right, and takes its time."""

    def __init__(self, config: Any, context: Any) -> None:
        self.num_drafts = 0

    def propose(self, batch: Any) -> Draft:
        self.num_drafts += 1
        Clock.now += 0.02
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([[int(request.token_ids[-1])] * min(2, most) for request, most in pairs])


@hookimpl
def specdec_proposers() -> Any:
    return [offer("wrong", Wrong, NoOptions)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


def simulate(
    watch: LossWatch, steps: int, tokens: float, draft_s: float, verify_s: float, requests: int = 1, prefill: int = 0
) -> int:
    """Simulate decode steps, in which a plain one takes a second. Returns how many of them were skipped."""
    num_skipped = 0
    for _ in range(steps):
        skipped = watch.skips(requests)
        num_skipped += skipped
        watch.add(
            StepReport(
                num_prefill_tokens=prefill,
                num_decode_requests=requests,
                num_output_tokens=round(requests * (1 if skipped else tokens)),
                num_nodes=0 if skipped else 3 * requests,
                draft_s=0.0 if skipped else draft_s,
                target_s=1.0 if skipped else 1 + verify_s,
            ),
            has_asked=not skipped,
        )
    return num_skipped


@pytest.mark.parametrize(
    ("tokens", "draft_s", "verify_s", "is_loss"),
    [(1, 0.1, 0.1, True), (2, 0.5, 0.2, False), (2, 0.9, 0.3, True), (1, 0.0, 0.03, False)],
)
def test_it_warns_if_and_only_if_plain_decoding_is_faster(
    tokens: float, draft_s: float, verify_s: float, is_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = LossWatch("Do this.")
    assert simulate(watch, 1000, tokens, draft_s, verify_s, requests=4) == NUM_PLAIN
    assert len(warnings_of(caplog)) == is_loss
    for message in warnings_of(caplog):
        assert f"{tokens / (1 + draft_s + verify_s):.2f} of plain decoding's tokens per second" in message
        assert message.endswith("Do this.")


def test_a_few_slow_steps_are_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch("Do this.")
    for i in range(300):
        simulate(watch, 1, 2, 0.2, 60.0 if i % 60 == 7 else 0.1)
    assert not warnings_of(caplog)


def test_nothing_is_skipped_where_many_tokens_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    assert simulate(LossWatch("Do this."), 1000, 4, 0.1, 0.1) == 0
    assert not warnings_of(caplog)


def test_steps_with_prefill_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch("Do this.")
    simulate(watch, 1000, 1, 0.1, 0.1, prefill=5)
    assert not watch.skips(1)
    assert not warnings_of(caplog)


def test_steps_of_other_batch_sizes_are_compared_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch("Do this.")
    assert simulate(watch, 200, 2, 0.1, 0.1, requests=1) == NUM_PLAIN
    assert simulate(watch, 200, 2, 0.1, 1.9, requests=16) == NUM_PLAIN
    (message,) = warnings_of(caplog)
    assert "at a batch size of 16" in message
    assert simulate(watch, 200, 1, 0.1, 1.9, requests=64) == NUM_PLAIN, "what is skipped must not depend on times"
    assert len(warnings_of(caplog)) == 1, "it warns once"


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_engine_warns(
    adaptive: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_report, "perf_counter", Clock())
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + (NUM_PLAIN + 3) * NUM_BETWEEN, ignore_eos=True)
    config = {"method": "wrong", "num_speculative_tokens": 2, "adaptive_draft_length": adaptive}
    prompt = {"prompt_token_ids": [5, 6, 7]}

    def run(speculative_config: Any) -> tuple[Any, int]:
        with LLM(
            folder,
            plugins=Plugins.load(modules=[__name__]),
            speculative_config=speculative_config,
            skip_tokenizer_init=True,
            dtype="float32",
        ) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            drafters = llm.engine._speculation.drafters
            return output.outputs[0].token_ids, drafters[0].proposer.proposer.num_drafts if drafters else 0

    folder = tiny_target(tmp_path)
    expected, _ = run(None)
    found, num_drafts = run(config)
    assert found == expected
    assert num_drafts > 5
    assert len(warnings_of(caplog)) == (not adaptive)
    for message in warnings_of(caplog):
        assert "adaptive_draft_length=True" in message
        assert "another number than 2" in message
    assert all(record.levelno == logging.WARNING for record in caplog.records if WARNING in record.getMessage())
