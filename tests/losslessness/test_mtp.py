"""An MTP module in an engine drafts what a reference implementation drafts from scratch, whether earlier draft tokens
were accepted or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from feature_faults import (
    FEATURE_FAULTS,
    embeddings_are_those_of_the_features_own_tokens,
    features_of_drafted_nodes_stay,
    positions_begin_at_one,
)
from nightly import IS_NIGHTLY
from pass_faults import PASS_FAULTS, WINDOW_FAULTS, fix_levels, nodes_see_no_ancestors, num_dead
from probe_mutations import what_follows_a_slot_is_ignored, zero_the_cache
from recorded_runs import (
    Asked,
    Outcome,
    check_outputs,
    mismatches,
    off_now_and_then,
    plain_outputs,
    random_requests,
    run,
    save_talkative_model,
    what_happened,
    with_common_beginnings,
)

sys.path.extend(
    str(Path(__file__).parents[2] / "proposers" / name / "tests") for name in ("medusa", "mtp")
)  # the references

from mtp_from_scratch import MTPFromScratch
from trained_heads import trained_head

from specdec_core import SamplingParams, TokenTree

Patch = pytest.MonkeyPatch
FIRST, LAST = (0, 1100) if IS_NIGHTLY else (30, 75)  # by day, long requests after short ones
NUM_COMPARED = 1650 if IS_NIGHTLY else 40
TOLERANCE = 5e-4
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]")
CHAIN = TokenTree.chain(6)
SAMPLED = {"draft_sample_method": "probabilistic"}
WAYS: dict[str, tuple[dict[str, Any], TokenTree]] = {
    "one token": ({}, TokenTree.chain(1)),
    "chain": ({"num_speculative_tokens": 6}, CHAIN),
    "sampled chain": ({"num_speculative_tokens": 6, **SAMPLED}, CHAIN),
    "tree": ({"speculative_token_tree": str(list(TREE.paths))}, TREE),
    "sampled tree": ({"speculative_token_tree": str(list(TREE.paths)), **SAMPLED}, TREE),
}
"""How the module drafts: options of speculative_config, and the shape of the drafts."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"), certainty=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def module(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_head("mtp", target, tmp_path_factory.mktemp("module") / "mtp", prepare=sharpen, num_steps=2)


def sharpen(trainee: torch.nn.Module) -> None:
    """Make weights so large that a wrong position or attention mask changes the drafts."""
    for parameter in trainee.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(LAST)[FIRST:]


@pytest.fixture(scope="module")
def from_scratch(target: Path, module: Path) -> Callable[..., MTPFromScratch]:
    """A function that returns the reference implementation of a way of drafting."""

    @cache
    def make(way: str, window: int | None = None) -> MTPFromScratch:
        return MTPFromScratch(target, module, WAYS[way][1], is_sampled="sampled" in way, window=window)

    return make


def drafted_by(module: Path, way: str, target: Path, asked: list[Asked], **more: Any) -> Outcome:
    options, shape = WAYS[way]
    asked = [attrs.evolve(each, params=_at_most(len(shape.paths), each.params)) for each in asked]
    return run(target, asked, model=str(module), method="mtp", **options, **more)


def _at_most(num_tokens: int, params: SamplingParams) -> SamplingParams:
    wanted = params.num_speculative_tokens
    return attrs.evolve(params, num_speculative_tokens=wanted and min(wanted, num_tokens))


BY_DAY = ["sampled tree"]


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in BY_DAY else pytest.mark.nightly) for way in WAYS])
def test_drafts_are_those_computed_from_scratch(
    way: str, target: Path, module: Path, asked: list[Asked], from_scratch: Any
) -> None:
    outcome = drafted_by(module, way, target, asked, num_kv_blocks=32)  # many preemptions
    differing = list(mismatches(outcome, from_scratch(way), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome)
    del happened["no draft"]
    if way == "one token":
        del happened["accepted in part"], happened["two or more accepted"]
    assert min(happened.values()) >= 3, happened
    assert set(outcome.journal.num_in_batch) >= {1, 2, 7, 8}


@pytest.mark.parametrize(
    ("way", "is_off", "fault"),
    [
        ("chain", off_now_and_then, None),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("tree", None, None),
                ("tree", off_now_and_then, None),
                ("tree", None, what_follows_a_slot_is_ignored),
                ("chain", off_now_and_then, what_follows_a_slot_is_ignored),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_cached_prefixes_and_late_observations_make_no_difference(
    way: str,
    is_off: Any,
    fault: Any,
    target: Path,
    module: Path,
    asked: list[Asked],
    from_scratch: Any,
    monkeypatch: Patch,
) -> None:
    if fault is not None:
        zero_the_cache(monkeypatch)
        fault(monkeypatch)
    some = with_common_beginnings(asked[:30])
    outcome = drafted_by(module, way, target, some, kv_manager="prefix", is_off=is_off)
    num_compared = NUM_COMPARED if fault is None else len(outcome.journal.drafts)
    first = next(mismatches(outcome, from_scratch(way), num_compared, TOLERANCE), None)
    assert (first is not None) == (fault is not None), first
    assert outcome.num_cached > 200
    check_outputs(outcome, some, plain_outputs(target, some))


CHECKED = [
    embeddings_are_those_of_the_features_own_tokens,
    features_of_drafted_nodes_stay,
    nodes_see_no_ancestors,
    positions_begin_at_one,
]
CHECKED_BY_NIGHT = [fault for fault in (*FEATURE_FAULTS, *PASS_FAULTS) if fault not in CHECKED]


@pytest.mark.parametrize(
    "fault",
    [*CHECKED, *(pytest.param(fault, marks=pytest.mark.nightly) for fault in CHECKED_BY_NIGHT)],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(
    fault: Any, target: Path, module: Path, asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(module, "tree", target, asked[:18])
    scratch = from_scratch("tree")
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["chain", "sampled tree"])
def test_windows_are_those_computed_from_scratch(
    way: str, target: Path, module: Path, asked: list[Asked], from_scratch: Any
) -> None:
    few = asked[:100]
    outcome = drafted_by(module, way, target, few, draft_window=4)
    differing = list(mismatches(outcome, from_scratch(way, 4), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))


@pytest.mark.nightly
@pytest.mark.parametrize("fault", WINDOW_FAULTS, ids=lambda fault: fault.__name__)
def test_other_windows_are_noticed(
    fault: Any, target: Path, module: Path, asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(module, "tree", target, asked[:40], draft_window=4)
    scratch = from_scratch("tree", 4)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.nightly
def test_levels_of_a_fixed_size_make_the_same_drafts(
    target: Path, module: Path, asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead, few = num_dead(monkeypatch), asked[:60]
    outcome = drafted_by(module, "sampled tree", target, few)
    differing = list(mismatches(outcome, from_scratch("sampled tree"), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))
    assert sum(dead) > 30
