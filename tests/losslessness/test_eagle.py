"""EAGLE draft heads in an engine draft what reference implementations draft from scratch, whether earlier draft tokens
were accepted or not."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from feature_faults import FEATURE_FAULTS
from nightly import IS_NIGHTLY
from pass_faults import (
    CHAIN_FAULTS,
    PASS_FAULTS,
    WINDOW_FAULTS,
    dead_entries_overwrite_the_slot_before_the_nodes,
    fix_levels,
    num_dead,
)
from probe_mutations import what_follows_a_slot_is_ignored, zero_the_cache
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

sys.path.append(str(Path(__file__).parents[2] / "proposers" / "eagle" / "tests"))  # the references

from eagle_from_scratch import EagleFromScratch
from fitted_heads import fitted
from reference_heads import target_token_ids
from tiny_heads import TinyHead, write_eagle, write_specforge
from tiny_weights import Shape, Target

from specdec_core import RequestView, TokenTree
from specdec_proposer_eagle.context_vocabulary import ContextVocabulary

Patch = pytest.MonkeyPatch
NUM_REQUESTS = 1100 if IS_NIGHTLY else 110
NUM_COMPARED = 1650 if IS_NIGHTLY else 60
TOLERANCE = 5e-4  # a head takes its own output up to six times: of 1040 rows in float32, 1% differ by over 1e-5
NUM_LAYERS = 6
TAPS = {"eagle": [-1], "eagle3": [2, NUM_LAYERS // 2, NUM_LAYERS - 3]}
TREE = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]")
DYNAMIC = {"top_k": 3, "depth": 3}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"eagle_topk": 1, "num_speculative_tokens": 6},
    "sampled chain": {"draft_sample_method": "probabilistic", "num_speculative_tokens": 6},
    "tree": {"speculative_token_tree": str(list(TREE.paths))},
    "sampled tree": {"speculative_token_tree": str(list(TREE.paths)), "draft_sample_method": "probabilistic"},
    "dynamic tree": {"eagle_topk": 3, "eagle_depth": 3, "num_speculative_tokens": 12},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"), certainty=1, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyHead]:
    sizes = Target(32, VOCAB_SIZE, NUM_LAYERS, embedding_rms=1.2, feature_rms=1.0)
    folder = tmp_path_factory.mktemp("heads")
    eagle = write_eagle(folder / "eagle", sizes, seed=3)
    eagle3 = write_specforge(folder / "eagle3", sizes, seed=4, shape=Shape(draft_vocab_size=8))
    return {
        "eagle": fitted(eagle, target, folder / "fitted", TAPS["eagle"]),
        "eagle3": fitted(eagle3, target, folder / "fitted3", TAPS["eagle3"]),
    }


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(NUM_REQUESTS)


def drafted_by(head: TinyHead, method: str, way: str, target: Path, asked: list[Asked], **settings: Any) -> Outcome:
    return run(target, asked, method=method, model=str(head.folder), **WAYS[way], **settings)


def from_scratch(head: TinyHead, method: str, way: str, target: Path, **options: Any) -> EagleFromScratch:
    """Make the reference implementation of a draft method.

    way: how the draft head drafts, such as "sampled chain" or "dynamic tree".
    options: further keyword arguments of EagleFromScratch.
    """
    kind: dict[str, Any] = (
        DYNAMIC if way == "dynamic tree" else {"shape": TREE if "tree" in way else TokenTree.chain(6)}
    )
    return EagleFromScratch(target, head, TAPS[method], **kind, is_sampled="sampled" in way, **options)


BY_DAY = [("eagle", "chain"), ("eagle", "dynamic tree"), ("eagle3", "tree"), ("eagle3", "sampled tree")]


@pytest.mark.parametrize(
    ("method", "way"),
    [
        pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly)
        for case in product(("eagle", "eagle3"), WAYS)
    ],
)
def test_drafts_are_those_computed_from_scratch(
    method: str, way: str, target: Path, heads: dict[str, TinyHead], asked: list[Asked]
) -> None:
    head = heads[method]
    outcome = drafted_by(head, method, way, target, asked)
    differing = list(mismatches(outcome, from_scratch(head, method, way, target), NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    happened = what_happened(outcome)
    del happened["no draft"]
    assert min(happened.values()) >= 3, happened
    assert set(outcome.journal.num_in_batch) == set(range(1, 9))


@pytest.mark.parametrize(
    ("is_off", "fault"),
    [
        (off_now_and_then, None),
        (None, what_follows_a_slot_is_ignored),
        pytest.param(None, None, marks=pytest.mark.nightly),
        pytest.param(off_now_and_then, what_follows_a_slot_is_ignored, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value and value.__name__,
)
def test_cached_prefixes_and_late_observations_make_no_difference(
    is_off: Any, fault: Any, target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    if fault is not None:
        zero_the_cache(monkeypatch)
        fault(monkeypatch)
    head, some = heads["eagle3"], with_common_beginnings(asked[:80])
    outcome = drafted_by(head, "eagle3", "tree", target, some, kv_manager="prefix", is_off=is_off)
    reference = from_scratch(head, "eagle3", "tree", target)
    first = next(mismatches(outcome, reference, len(outcome.journal.drafts), TOLERANCE), None)
    assert (first is not None) == (fault is not None), first
    assert outcome.num_cached > 300
    check_outputs(outcome, some, plain_outputs(target, some))


@pytest.mark.parametrize("window", [pytest.param(2, marks=pytest.mark.nightly), 5])
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.nightly) for way in ("sampled chain", "tree")), "dynamic tree"]
)
@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.nightly), "eagle3"])
def test_drafts_with_a_window_are_those_computed_from_scratch(
    method: str, way: str, window: int, target: Path, heads: dict[str, TinyHead], asked: list[Asked]
) -> None:
    head, few = heads[method], asked[:60]
    outcome = drafted_by(head, method, way, target, few, draft_window=window)
    differing = list(mismatches(outcome, from_scratch(head, method, way, target, window=window), 60, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))


@pytest.mark.parametrize("fault", WINDOW_FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_windows_are_noticed(
    fault: Any, target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    head = heads["eagle3"]
    outcome = drafted_by(head, "eagle3", "tree", target, asked[:40], draft_window=4)
    scratch = from_scratch(head, "eagle3", "tree", target, window=4)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.parametrize(
    "way",
    [*(pytest.param(way, marks=pytest.mark.nightly) for way in ("sampled chain", "dynamic tree")), "sampled tree"],
)
def test_levels_of_a_fixed_size_make_the_same_drafts(
    way: str, target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead = num_dead(monkeypatch)
    head, few = heads["eagle3"], asked[:60]
    options = {"eagle_min_prob": 0.1} if way == "dynamic tree" else {}
    outcome = drafted_by(head, "eagle3", way, target, few, eagle_context_tokens=1, **options)
    monkeypatch.undo()
    if way == "dynamic tree":
        shrunk = drafted_by(head, "eagle3", way, target, few, eagle_context_tokens=1, **options)
        assert trees_of(outcome) == trees_of(shrunk)
    else:
        reference = from_scratch(head, "eagle3", way, target, context_tokens=1)
        differing = list(mismatches(outcome, reference, NUM_COMPARED, TOLERANCE))
        assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))
    assert sum(dead) > 30


def trees_of(outcome: Outcome) -> list[tuple[str, int, list[int], list[int]]]:
    drafts = outcome.journal.drafts
    return [(each.request_id, len(each.history), each.token_ids, each.parents) for each in drafts]


def test_dead_entries_that_overwrite_others_are_noticed(
    target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead_entries_overwrite_the_slot_before_the_nodes(monkeypatch)
    outcome = drafted_by(heads["eagle3"], "eagle3", "tree", target, asked[:40])
    scratch = from_scratch(heads["eagle3"], "eagle3", "tree", target)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "dynamic tree" else pytest.mark.nightly) for way in WAYS],
)
def test_tokens_of_the_context_are_drafted(
    way: str, target: Path, heads: dict[str, TinyHead], asked: list[Asked]
) -> None:
    """The draft head's vocabulary lacks two tokens of the target. With context_tokens=1, the one that occurred last in
    the request's text can be drafted, too."""
    head = heads["eagle3"]
    outcome = drafted_by(head, "eagle3", way, target, asked, eagle_context_tokens=1)
    reference = from_scratch(head, "eagle3", way, target, context_tokens=1)
    differing = list(mismatches(outcome, reference, NUM_COMPARED, TOLERANCE))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain_outputs(target, asked))
    own = {*target_token_ids(head.tensors, 8).tolist()}
    assert sum(token not in own for drafted in outcome.journal.drafts for token in drafted.token_ids) > 100


def tokens_are_of_another_requests_text(patch: Patch) -> None:
    begin = ContextVocabulary.begin
    patch.setattr(ContextVocabulary, "begin", lambda self, requests: begin(self, [*requests[1:], requests[0]]))


def tokens_are_of_the_prompt(patch: Patch) -> None:
    read = ContextVocabulary._read
    patch.setattr(
        ContextVocabulary, "_read", lambda self, request: not self._recent.get(request.id) and read(self, request)
    )


def tokens_that_occurred_first_are_kept(patch: Patch) -> None:
    def read(self: Any, request: RequestView) -> bool:
        lacking = request.token_ids[self._lacks[request.token_ids]].tolist()
        self._recent[request.id] = dict.fromkeys([*dict.fromkeys(lacking)][: self._num_tokens])
        return True

    patch.setattr(ContextVocabulary, "_read", read)


def tokens_stay_those_of_the_batchs_first_draft(patch: Patch) -> None:
    read = ContextVocabulary._read
    patch.setattr(ContextVocabulary, "_read", lambda self, request: read(self, request) and False)


@pytest.mark.parametrize(
    "fault",
    [
        tokens_are_of_another_requests_text,
        tokens_are_of_the_prompt,
        tokens_that_occurred_first_are_kept,
        tokens_stay_those_of_the_batchs_first_draft,
    ],
    ids=lambda fault: fault.__name__,
)
def test_wrong_tokens_of_the_context_are_noticed(
    fault: Any, target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(heads["eagle3"], "eagle3", "tree", target, asked[:40], eagle_context_tokens=1)
    scratch = from_scratch(heads["eagle3"], "eagle3", "tree", target, context_tokens=1)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.parametrize("fault", [*FEATURE_FAULTS, *PASS_FAULTS, *CHAIN_FAULTS], ids=lambda fault: fault.__name__)
def test_faults_are_noticed(
    fault: Any, target: Path, heads: dict[str, TinyHead], asked: list[Asked], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    shape = "chain" if fault in CHAIN_FAULTS else "tree"
    outcome = drafted_by(heads["eagle3"], "eagle3", shape, target, asked[:40])
    scratch = from_scratch(heads["eagle3"], "eagle3", shape, target)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None
