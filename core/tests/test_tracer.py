"""`Engine.tracer` gets what each step drafted and decided, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from specdec_core import LLM, SamplingParams
from specdec_core.engine import step_report

PROMPTS = ["def first(values):\n    return ", "class Bigram(Proposer):\n", "self.most = most\n"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=10, seed=3),
    SamplingParams(temperature=1.5, max_tokens=8, seed=4, allowed_token_ids=[7, 8, 9, 10]),
]


@pytest.fixture(params=[None, {"method": "bigram", "num_speculative_tokens": 3}], ids=["plain", "bigram"])
def llm(request, checkpoint, bigram_site, monkeypatch):
    monkeypatch.syspath_prepend(bigram_site)
    with LLM(checkpoint, dtype="float32", speculative_config=request.param) as made:
        yield made


def outputs_of(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_what_a_trace_has(llm):
    untraced, traces = outputs_of(llm), []
    llm.engine.tracer = traces.append
    traced = outputs_of(llm)
    assert traced == untraced
    emitted = {}
    for trace in traces:
        draft, probs = trace.draft, trace.target_probs
        assert probs.shape == (draft.num_nodes + draft.batch_size, llm.engine.target.info.vocab_size)
        torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
        for index, request_id in enumerate(trace.request_ids):
            number = int(trace.verdict.num_accepted[index]) + 1
            tokens, rows = trace.verdict.token_ids[index, :number], trace.verdict.rows[index, :number].long()
            assert (probs[rows, tokens] > 0).all()
            emitted.setdefault(request_id, []).extend(zip(tokens.tolist(), probs[rows], strict=True))
        assert trace.own_drafts.keys() == ({"bigram"} if llm.speculative_config is not None else set())
    for request, params, token_ids in zip(emitted.values(), PARAMS, traced, strict=True):
        decided = request[: len(token_ids)]  # the last draft may go on after the end
        assert [token for token, _ in decided] == token_ids
        for token, probs in decided:
            if params.temperature == 0:
                assert token == int(probs.argmax())
                assert (probs > 0).sum() > 100, "not only the argmax"
            else:
                assert (probs > 0).sum() == (5 if params.top_k else len(params.allowed_token_ids))


def test_nothing_is_computed_without_a_tracer(llm, monkeypatch):
    monkeypatch.setattr("specdec_core.engine.verification.Verification.target_probs", None)
    assert outputs_of(llm)


def test_the_time_of_tracing_counts_for_no_part_of_a_step(llm, monkeypatch):
    now, reports = [0.0], []
    monkeypatch.setattr(step_report, "perf_counter", lambda: now[0])

    def take_long(trace):
        now[0] += 100

    llm.engine.tracer = take_long
    llm.engine.add_request([1, 2, 3], PARAMS[0])
    while llm.engine.has_unfinished:
        reports.append(llm.engine.step())
    assert now[0] == 100 * len(reports) > 100
    assert {(each.draft_s, each.target_s, each.verify_s, each.other_s) for each in reports} == {(0.0, 0.0, 0.0, 0.0)}
