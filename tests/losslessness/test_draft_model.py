"""A draft model's cache says what the model says without one, whatever became of earlier drafts.

This is where acceptance is lost in silence: the output stays right when it is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_model_from_scratch import DraftModelFromScratch
from pass_faults import PASS_FAULTS
from recorded_runs import (
    Asked,
    Outcome,
    accepted_path,
    check_outputs,
    mismatches,
    plain_outputs,
    random_requests,
    run,
    save_talkative_model,
    what_happened,
)
from safetensors.torch import load_file, save_file

from specdec_core import TokenTree
from specdec_proposer_draft.proposer import DraftModelProposer, Stored

Patch = pytest.MonkeyPatch
NUM_REQUESTS = 1100 if os.environ.get("SPECDEC_NIGHTLY") else 110
NUM_COMPARED = 2 * NUM_REQUESTS
SHAPES = {
    "chain": TokenTree.chain(6),
    "tree": TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights, and half as much of a vocabulary of padding."""
    folder = tmp_path_factory.mktemp("draft")
    generator = torch.Generator().manual_seed(3)
    weights = load_file(target / "model.safetensors")
    for weight in weights.values():
        if weight.dim() == 2:
            weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((target / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(NUM_REQUESTS)


def drafted_by(
    draft: Path, shape: TokenTree, method: str, target: Path, asked: list[Asked], num_kv_blocks: int = 48
) -> Outcome:
    """There are steps without drafts, whenever many requests run."""
    return run(
        target,
        asked,
        num_kv_blocks,
        method="draft_model",
        model=str(draft),
        num_speculative_tokens=len(shape.paths),
        speculative_token_tree=str(list(shape.paths)),
        draft_sample_method=method,
        disable_by_batch_size=7,
    )


def num_plain_steps(outcome: Outcome) -> int:
    """Tokens that came without a draft between two drafts of a request."""
    last: dict[str, int] = {}
    total = 0
    for drafted in outcome.journal.drafts:
        where = drafted.request_id
        if where in last and not drafted.was_reset:
            total += len(drafted.history) - last[where]
        depth, _ = accepted_path(drafted, outcome.texts[where])
        last[where] = len(drafted.history) + depth + 1
    return total


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_computed_from_scratch(
    shape: str, method: str, target: Path, draft: Path, asked: list[Asked]
) -> None:
    outcome = drafted_by(draft, SHAPES[shape], method, target, asked)
    scratch = DraftModelFromScratch(draft, SHAPES[shape], is_sampled=method == "probabilistic")
    differing = list(mismatches(outcome, scratch, NUM_COMPARED))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome) | {"plain steps": num_plain_steps(outcome)}
    del happened["no draft"]
    assert min(happened.values()) >= 3, happened


def counts_what_was_never_forwarded(patch: Patch) -> None:
    def settle(self: Any, request: Any) -> None:
        if self.num_levels:
            self.num_tokens = len(request.token_ids) - 1
        self.num_levels = 0

    patch.setattr(Stored, "settle", settle)


def forgets_plain_steps(patch: Patch) -> None:
    patch.setattr(DraftModelProposer, "observe", lambda self, observation: None)


def keeps_the_cache_of_a_preempted_request(patch: Patch) -> None:
    patch.setattr(DraftModelProposer, "reset", lambda self, request: None)


FAULTS = [
    counts_what_was_never_forwarded,
    forgets_plain_steps,
    keeps_the_cache_of_a_preempted_request,
    *PASS_FAULTS,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_noticed(fault: Any, target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    shape = SHAPES["chain" if fault is counts_what_was_never_forwarded else "tree"]  # deep enough to be accepted whole
    outcome = drafted_by(draft, shape, "greedy", target, asked, num_kv_blocks=28)  # many preemptions
    scratch = DraftModelFromScratch(draft, shape, is_sampled=False)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None
