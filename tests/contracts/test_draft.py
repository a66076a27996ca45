"""Drafts with dead (padding) nodes, and drafts whose `q` holds the probabilities of only a few tokens per row (sparse).

In some tests the engine validates drafts on the host, in others on their device.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from specdec_core import LLM, Draft, Plugins, SamplingParams, StepReport
from specdec_core.engine.speculation import Speculation
from specdec_testing import tiny_target

PROMPTS = [[3, 1, 4, 1, 5] * 5, [7, 2], [11] * 9, [8, 9, 2, 8, 9, 6, 8, 9]]
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@define
class Ran:
    outputs: list[list[int]]
    reports: list[StepReport] = field(factory=list)
    drafts: list[Draft] = field(factory=list)  # of the steps in which any was made, over all scheduled requests


def run(target: Path, method: str | None, patch: pytest.MonkeyPatch, *, is_read: bool = True, **options: Any) -> Ran:
    """Generate for four requests until all are finished; return outputs, step reports and drafts.

    method: name of the draft method; None: plain decoding.
    is_read: whether the engine validates drafts on the host (True) or on their device (False).
    options: sampling parameters, and the name of the `verifier`.
    """
    verifier = options.pop("verifier", "auto")
    speculative_config = {"method": method, "num_speculative_tokens": 5, "verifier": verifier}
    llm = LLM(
        target,
        plugins=Plugins.load(modules=["good_proposers"]),
        speculative_config=None if method is None else speculative_config,
        dtype="float32",
        num_kv_blocks=128,
        skip_tokenizer_init=True,
    )
    engine, ended = llm.engine, {}
    for drafter in engine._speculation.drafters:
        drafter.reads_drafts = is_read
    found = Ran([])
    propose = Speculation.propose

    def recorded(*args: Any) -> Any:
        draft = propose(*args)
        found.drafts += [draft] if draft.num_nodes else []
        return draft

    def listen(request: Any, pieces: Any) -> None:
        ended[request.id] = request.output_token_ids

    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=i, **options), listen)
        for i, prompt in enumerate(PROMPTS)
    ]
    with patch.context() as watching:
        watching.setattr(Speculation, "propose", recorded)
        while engine.has_unfinished:
            found.reports.append(engine.step())
    found.outputs = [ended[request_id] for request_id in ids]
    return found


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "checked on its device"])
@pytest.mark.parametrize("method", ["fading", "selecting"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chosen_as_in_plain_decoding(
    target: Path, monkeypatch: pytest.MonkeyPatch, method: str, temperature: float, is_read: bool
) -> None:
    """With the verifier "chosen", outputs equal those of plain decoding with the same seeds, even if draft tokens are
    sampled.

    The verifier "chosen" samples the target's own tokens, and accepts the draft tokens that equal them.
    """
    plain = run(target, None, monkeypatch, temperature=temperature)
    found = run(target, method, monkeypatch, is_read=is_read, verifier="chosen", temperature=temperature)
    assert found.outputs == plain.outputs
    assert sum(report.num_draft_tokens for report in found.reports) > 5
    assert temperature or sum(report.num_accepted for report in found.reports) > 0


@pytest.mark.parametrize("method", ["fading", "selecting"])
@pytest.mark.parametrize("verifier", ["auto", "rejection", "traversal"])
def test_the_device_check_changes_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch, method: str, verifier: str
) -> None:
    read, checked = (
        run(target, method, monkeypatch, is_read=is_read, verifier=verifier, temperature=1.0)
        for is_read in (True, False)
    )
    assert read.outputs == checked.outputs
    assert [report.accepted_per_request for report in read.reports] == [
        report.accepted_per_request for report in checked.reports
    ]
    assert sum(report.num_draft_tokens for report in read.reports) > 5


def wrong_counts(found: Ran) -> list[Any]:
    """Return the step reports that count draft tokens wrongly: dead (padding) nodes are counted, or live nodes are
    not."""
    reports = [report for report in found.reports if report.verifier]
    drafts = [draft for draft in found.drafts if (draft.parents != -2).any()]
    assert len(found.drafts) > len(drafts) or len(reports) > 3
    wrong: list[Any] = [report for report in found.reports if report.num_draft_tokens and not report.verifier]
    if len(reports) != len(drafts):
        return [*wrong, (len(reports), len(drafts))]
    for report, draft in zip(reports, drafts, strict=True):
        live = [int((draft.parents[start:end] != -2).sum()) for start, end in pairwise(draft.offsets)]
        is_right = (report.num_draft_tokens, report.num_nodes) == (sum(live), draft.num_nodes)
        is_right &= len(report.accepted_per_request) == sum(n > 0 for n in live)
        wrong += [] if is_right else [(report, live)]
    return wrong


def test_live_nodes_are_counted(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(target, "fading", monkeypatch, temperature=1.0)
    has_dead = [draft for draft in found.drafts if (draft.parents == -2).any()]
    assert len(has_dead) > 3
    assert wrong_counts(found) == []


def test_a_count_of_nodes_is_noticed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "num_live_per_request", property(lambda draft: draft.num_nodes_per_request))
    assert wrong_counts(run(target, "fading", monkeypatch, temperature=1.0, verifier="rejection"))
