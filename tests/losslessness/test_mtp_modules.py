"""Several MTP modules in an engine draft what a reference implementation drafts from scratch: a module for each depth
of the drafts, each with a KV cache that holds the whole text so far."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from nightly import IS_NIGHTLY
from pass_faults import PASS_FAULTS, WINDOW_FAULTS, fix_levels, num_dead
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
from safetensors.torch import load_file, save_file
from several_modules_faults import (
    SEVERAL_MODULES_FAULTS,
    deeper_modules_read_tokens_one_earlier,
    deeper_slots_of_drafted_tokens_stay,
    the_first_module_drafts_all_tokens,
)
from test_mtp import TOLERANCE, sharpen

sys.path.extend(str(Path(__file__).parents[2] / "proposers" / name / "tests") for name in ("medusa", "mtp"))

from mtp_from_scratch import MTPFromScratch
from trained_heads import trained_head

from specdec_core import TokenTree

Patch = pytest.MonkeyPatch
FIRST, LAST = (0, 300) if IS_NIGHTLY else (30, 75)  # by day, long requests after short ones
NUM_COMPARED = 500 if IS_NIGHTLY else 40
NUM_LAYERS = 2  # of the target
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]")
FLAT_TREE = TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]")
SAMPLED = {"draft_sample_method": "probabilistic"}
WAYS: dict[str, tuple[int, dict[str, Any], TokenTree]] = {
    "2, chain of 1": (2, {"num_speculative_tokens": 1}, TokenTree.chain(1)),
    "2, chain of 2": (2, {"num_speculative_tokens": 2}, TokenTree.chain(2)),
    "2, chain of 4": (2, {"num_speculative_tokens": 4}, TokenTree.chain(4)),
    "2, sampled chain of 4": (2, {"num_speculative_tokens": 4, **SAMPLED}, TokenTree.chain(4)),
    "2, flat tree": (2, {"speculative_token_tree": str(list(FLAT_TREE.paths))}, FLAT_TREE),
    "2, tree": (2, {"speculative_token_tree": str(list(TREE.paths))}, TREE),
    "2, sampled tree": (2, {"speculative_token_tree": str(list(TREE.paths)), **SAMPLED}, TREE),
    "3, chain of 3": (3, {"num_speculative_tokens": 3}, TokenTree.chain(3)),
    "3, chain of 6": (3, {"num_speculative_tokens": 6}, TokenTree.chain(6)),
}
"""How the modules draft: their number, options of speculative_config, and the shape of the drafts."""
BY_DAY = ["2, sampled tree"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"), certainty=1, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def modules(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of three modules: one that was trained, and two that resemble it."""
    folder = trained_head("mtp", target, tmp_path_factory.mktemp("modules") / "mtp", prepare=sharpen, num_steps=2)
    first, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    found = dict(first)
    for index in (1, 2):
        for name, tensor in first.items():
            other = name.replace(f"layers.{NUM_LAYERS}.", f"layers.{NUM_LAYERS + index}.")
            found[other] = tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    assert len(found) == 3 * len(first)
    save_file(found, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of modules: a checkpoint whose config.json has this number."""
    stated, found = json.loads((modules / "config.json").read_text()), {}
    for number in (2, 3):
        found[number] = tmp_path_factory.mktemp("modules")
        (found[number] / "model.safetensors").symlink_to(modules / "model.safetensors")
        (found[number] / "config.json").write_text(json.dumps(stated | {"num_nextn_predict_layers": number}))
    return found


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(LAST)[FIRST:]


@pytest.fixture(scope="module")
def from_scratch(target: Path, folders: dict[int, Path]) -> Callable[..., MTPFromScratch]:
    """A function that returns the reference implementation of a way of drafting."""

    @cache
    def make(way: str, window: int | None = None) -> MTPFromScratch:
        number, _, shape = WAYS[way]
        return MTPFromScratch(target, folders[number], shape, is_sampled="sampled" in way, window=window)

    return make


def drafted_by(folders: dict[int, Path], way: str, target: Path, asked: list[Asked], **more: Any) -> Outcome:
    number, options, shape = WAYS[way]
    asked = [_at_most(len(shape.paths), each) for each in asked]
    return run(target, asked, model=str(folders[number]), method="mtp", **options, **more)


def _at_most(num_tokens: int, each: Asked) -> Asked:
    wanted = each.params.num_speculative_tokens
    params = attrs.evolve(each.params, num_speculative_tokens=wanted and min(wanted, num_tokens))
    return attrs.evolve(each, params=params)


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in BY_DAY else pytest.mark.nightly) for way in WAYS])
def test_drafts_are_those_computed_from_scratch(
    way: str, target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any
) -> None:
    outcome = drafted_by(folders, way, target, asked, num_kv_blocks=32)  # many preemptions
    differing = list(mismatches(outcome, from_scratch(way), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome)
    del happened["no draft"]
    if way == "2, chain of 1":
        del happened["accepted in part"], happened["two or more accepted"]
    assert min(happened.values()) >= 3, happened


@pytest.mark.parametrize(
    "way", ["2, chain of 2", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("2, tree", "3, chain of 6"))]
)
def test_late_observations_and_prefix_caching_make_no_difference(
    way: str, target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any
) -> None:
    """Of the prompts of requests that draft, nothing is found again, since the modules' outputs are not in the KV
    cache."""
    some = with_common_beginnings(asked[:20])
    outcome = drafted_by(folders, way, target, some, kv_manager="prefix", is_off=off_now_and_then)
    first = next(mismatches(outcome, from_scratch(way), NUM_COMPARED, TOLERANCE), None)
    assert first is None, first
    check_outputs(outcome, some, plain_outputs(target, some))
    assert drafted_by(folders, way, target, some, kv_manager="prefix").num_cached == 0


CHECKED = [
    the_first_module_drafts_all_tokens,
    deeper_slots_of_drafted_tokens_stay,
    deeper_modules_read_tokens_one_earlier,
]
CHECKED_BY_NIGHT = [fault for fault in (*SEVERAL_MODULES_FAULTS, *PASS_FAULTS) if fault not in CHECKED]


@pytest.mark.parametrize(
    "fault",
    [*CHECKED, *(pytest.param(fault, marks=pytest.mark.nightly) for fault in CHECKED_BY_NIGHT)],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(
    fault: Any, target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(folders, "2, tree", target, asked[:18])
    scratch = from_scratch("2, tree")
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts), TOLERANCE), None) is not None


@pytest.mark.nightly
def test_windows_are_those_computed_from_scratch(
    target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any
) -> None:
    few = asked[:100]
    outcome = drafted_by(folders, "2, sampled tree", target, few, draft_window=4)
    differing = list(mismatches(outcome, from_scratch("2, sampled tree", 4), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", WINDOW_FAULTS, ids=lambda fault: fault.__name__)
def test_other_windows_are_noticed(
    fault: Any, target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(folders, "2, tree", target, asked[:40], draft_window=4)
    scratch = from_scratch("2, tree", 4)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts), TOLERANCE), None) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["2, sampled tree", "3, chain of 6"])
def test_levels_of_a_fixed_size_make_the_same_drafts(
    way: str, target: Path, folders: dict[int, Path], asked: list[Asked], from_scratch: Any, monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead, few = num_dead(monkeypatch), asked[:60]
    outcome = drafted_by(folders, way, target, few)
    differing = list(mismatches(outcome, from_scratch(way), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))
    assert sum(dead) > 30
