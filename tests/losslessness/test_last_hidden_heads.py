"""MLP speculators and Medusa heads in an engine draft what reference implementations draft from scratch, whether
earlier draft tokens were accepted or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from nightly import IS_NIGHTLY
from recorded_runs import (
    VOCAB_SIZE,
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
    str(Path(__file__).parents[2] / "proposers" / name / "tests") for name in ("mlp", "medusa")
)  # the references

from last_hidden_faults import (
    FAULTS,
    late_observations_are_lost,
    nodes_follow_their_parents_sibling,
    nodes_follow_those_of_another_request,
    states_stay_when_a_request_is_preempted,
    the_head_before_drafts,
    the_logits_are_the_targets,
    what_follows_a_cached_prefix_is_not_observed,
)
from last_hidden_from_scratch import LastHiddenFromScratch, MedusaHead, SpeculatorHead
from trained_heads import medusa_without_output_layers, trained_head

from specdec_core import SamplingParams, TokenTree

Patch = pytest.MonkeyPatch
NUM_REQUESTS = 1100 if IS_NIGHTLY else 110
NUM_COMPARED = 1500 if IS_NIGHTLY else 100
TOLERANCE = 5e-4
NUM_HEADS = 4
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]")
CHAIN = TokenTree.chain(NUM_HEADS)
HEADS: dict[str, dict[str, Any]] = {
    "speculator": {"n_predict": NUM_HEADS, "inner_dim": 24},
    "tied speculator": {"n_predict": NUM_HEADS, "tie_weights": True, "scale_input": True},
    "medusa": {"num_heads": NUM_HEADS},
    "medusa, small vocabulary": {"num_heads": NUM_HEADS, "truncated_vocab_size": 8},
}
"""Each head is trained with these options of its recipe."""
WITHOUT_OUTPUT_LAYERS = "medusa, the target's output layer"
SAMPLED = {"draft_sample_method": "probabilistic"}
WAYS: dict[str, tuple[dict[str, Any], TokenTree | None]] = {
    "chain": ({"speculative_token_tree": str(list(CHAIN.paths))}, CHAIN),
    "sampled chain": ({"num_speculative_tokens": NUM_HEADS, **SAMPLED}, CHAIN),
    "tree": ({"speculative_token_tree": str(list(TREE.paths))}, TREE),
    "sampled tree": ({"speculative_token_tree": str(list(TREE.paths)), **SAMPLED}, TREE),
    "paths": ({"n_candidates": 5}, None),
}
"""How heads draft: options of speculative_config, and the shape of the drafts."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"), certainty=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    found = {name: trained_head(method_of(name), target, folder / name, **HEADS[name]) for name in HEADS}
    found[WITHOUT_OUTPUT_LAYERS] = medusa_without_output_layers(folder / "without", NUM_HEADS, 32, VOCAB_SIZE)
    return found


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Requests of which none asks for more draft tokens than a chain has."""
    asked = random_requests(NUM_REQUESTS)
    params = [attrs.evolve(each.params, num_speculative_tokens=_at_most(each.params)) for each in asked]
    return [attrs.evolve(each, params=its) for each, its in zip(asked, params, strict=True)]


def _at_most(params: SamplingParams) -> int | None:
    number = params.num_speculative_tokens
    return number and min(number, NUM_HEADS)


def method_of(name: str) -> str:
    return "medusa" if name.startswith("medusa") else "mlp_speculator"


def drafted_by(heads: dict[str, Path], name: str, way: str, target: Path, asked: list[Asked], **more: Any) -> Outcome:
    return run(target, asked, model=str(heads[name]), method=method_of(name), **WAYS[way][0], **more)


@pytest.fixture(scope="module")
def from_scratch(target: Path, heads: dict[str, Path]) -> Callable[[str, str], LastHiddenFromScratch]:
    """A function that returns the reference implementation of a head and of how it drafts."""

    @cache
    def make(name: str, way: str) -> LastHiddenFromScratch:
        folder = heads[name]
        head: Any = partial(MedusaHead, folder) if name.startswith("medusa") else lambda _: SpeculatorHead(folder)
        return LastHiddenFromScratch(target, head, WAYS[way][1], is_sampled="sampled" in way)

    return make


CASES = [
    ("speculator", "paths"),
    ("speculator", "sampled tree"),
    ("tied speculator", "chain"),
    ("medusa, small vocabulary", "sampled tree"),
    (WITHOUT_OUTPUT_LAYERS, "tree"),
]
BY_NIGHT = [
    ("speculator", "chain"),
    ("speculator", "tree"),
    ("tied speculator", "sampled chain"),
    ("tied speculator", "paths"),
    ("medusa", "tree"),
    ("medusa", "sampled chain"),
    ("medusa, small vocabulary", "chain"),
    ("medusa, small vocabulary", "tree"),
]


@pytest.mark.parametrize(
    ("name", "way"), [*CASES, *[pytest.param(*case, marks=pytest.mark.nightly) for case in BY_NIGHT]]
)
def test_drafts_are_those_computed_from_scratch(
    name: str, way: str, target: Path, heads: dict[str, Path], asked: list[Asked], from_scratch: Any
) -> None:
    outcome = drafted_by(heads, name, way, target, asked)
    num_compared = NUM_COMPARED // 4 if way == "paths" else NUM_COMPARED  # the reference computes 48 paths for each
    differing = list(mismatches(outcome, from_scratch(name, way), num_compared, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome)
    del happened["no draft"]
    assert min(happened.values()) >= 3, happened
    assert set(outcome.journal.num_in_batch) >= set(range(2, 9))


@pytest.mark.parametrize(
    ("is_off", "fault"),
    [
        pytest.param(None, None, marks=pytest.mark.nightly),
        (off_now_and_then, None),
        (None, what_follows_a_cached_prefix_is_not_observed),
        (off_now_and_then, late_observations_are_lost),
    ],
    ids=lambda value: value and value.__name__,
)
@pytest.mark.parametrize("name", ["speculator", pytest.param("medusa", marks=pytest.mark.nightly)])
def test_cached_prefixes_and_late_observations_make_no_difference(
    name: str,
    is_off: Any,
    fault: Any,
    target: Path,
    heads: dict[str, Path],
    asked: list[Asked],
    from_scratch: Any,
    monkeypatch: Patch,
) -> None:
    if fault is not None:
        fault(monkeypatch)
    some = with_common_beginnings(asked[:60])
    outcome = drafted_by(heads, name, "tree", target, some, kv_manager="prefix", is_off=is_off)
    scratch = from_scratch(name, "tree")
    first = next(mismatches(outcome, scratch, len(outcome.journal.drafts), TOLERANCE), None)
    assert (first is not None) == (fault is not None), first
    assert outcome.num_cached > 200
    check_outputs(outcome, some, plain_outputs(target, some))


CHECKED = [
    *((fault, "speculator", "tree") for fault in FAULTS),
    (nodes_follow_their_parents_sibling, "speculator", "paths"),
    (states_stay_when_a_request_is_preempted, "medusa, small vocabulary", "sampled tree"),
    (the_logits_are_the_targets, WITHOUT_OUTPUT_LAYERS, "tree"),
]
CHECKED_BY_NIGHT = [
    (the_head_before_drafts, "medusa, small vocabulary", "sampled tree"),
    *((fault, "medusa", "tree") for fault in FAULTS),
    (nodes_follow_their_parents_sibling, "speculator", "tree"),
    (nodes_follow_those_of_another_request, "speculator", "paths"),
    (states_stay_when_a_request_is_preempted, "tied speculator", "sampled chain"),
]


@pytest.mark.parametrize(
    ("fault", "name", "way"),
    [*CHECKED, *[pytest.param(*case, marks=pytest.mark.nightly) for case in CHECKED_BY_NIGHT]],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_are_noticed(
    fault: Any,
    name: str,
    way: str,
    target: Path,
    heads: dict[str, Path],
    asked: list[Asked],
    from_scratch: Any,
    monkeypatch: Patch,
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(heads, name, way, target, asked[20:60], num_kv_blocks=32)  # many preemptions
    scratch = from_scratch(name, way)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts), TOLERANCE), None) is not None
