"""A draft model predicts the same with its KV cache as without one, whether earlier draft tokens were accepted or not.

No other test would notice wrong entries in this cache: they lower the acceptance rate, but the output stays right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from attrs import evolve
from draft_model_from_scratch import DraftModelFromScratch, Words, with_window
from nightly import IS_NIGHTLY
from noisy_drafts import save_in_other_words, save_noisy, save_words
from pass_faults import (
    PASS_FAULTS,
    WINDOW_FAULTS,
    dead_entries_overwrite_the_slot_before_the_nodes,
    fix_levels,
    num_dead,
)
from probe_mutations import zero_the_cache
from recorded_runs import (
    VOCAB_SIZE,
    Asked,
    Outcome,
    accepted_path,
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

from specdec_core import TokenTree
from specdec_proposer_draft.proposer import DraftModelProposer, Stored
from specdec_proposer_draft.vocabulary import SharedVocabulary

Patch = pytest.MonkeyPatch
NUM_REQUESTS = 1100 if IS_NIGHTLY else 110
NUM_COMPARED = 2200 if IS_NIGHTLY else 110
SHAPES = {
    "chain": TokenTree.chain(6),
    "tree": TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft model: the target with noise on its weights."""
    return save_noisy(target, tmp_path_factory.mktemp("draft"), range(VOCAB_SIZE))


TARGET_WORDS = ["a", "b", "c", "d", "e", "ab", "cd", "f", "g", "xe"]
DRAFT_WORDS = ["q", "cd", "a", "f", "e", "d", "r", "b", "c"]
WORDS = Words(stand_in=[2, 7, 8, 5, 4, 7, 1, 3, 0, 4], shared=[0, 1, 2, 3, 4, 6, 7])
"""Written by hand: the draft sees "b" for "ab", "e" for "xe", and any token for "g"."""


@pytest.fixture(scope="module")
def in_other_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a target and of a draft model whose tokenizers have seven tokens in common."""
    target = save_talkative_model(tmp_path_factory.mktemp("target_of_words"))
    save_words(target, TARGET_WORDS)
    return target, save_in_other_words(target, tmp_path_factory.mktemp("draft_of_words"), TARGET_WORDS, DRAFT_WORDS)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return random_requests(NUM_REQUESTS)


def drafted_by(
    draft: Path, shape: TokenTree, method: str, target: Path, asked: list[Asked], num_kv_blocks: int = 44, **more: Any
) -> Outcome:
    """Run requests with a draft model. Drafting is turned off in steps with more than 7 running requests.

    method: the value of the option draft_sample_method.
    more: further keyword arguments of `run`.
    """
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
        **more,
    )


def num_plain_steps(outcome: Outcome) -> int:
    """Return the number of tokens generated in steps without a draft, between two drafts of the same request."""
    last: dict[str, int] = {}
    total = 0
    for drafted in outcome.journal.drafts:
        where = drafted.request_id
        if where in last and not drafted.was_reset:
            total += len(drafted.history) - last[where]
        depth, _ = accepted_path(drafted, outcome.texts[where])
        last[where] = len(drafted.history) + depth + 1
    return total


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        ("chain", "greedy"),
        ("tree", "probabilistic"),
        pytest.param("chain", "probabilistic", marks=pytest.mark.nightly),
        pytest.param("tree", "greedy", marks=pytest.mark.nightly),
    ],
)
def test_drafts_are_those_computed_from_scratch(
    shape: str, method: str, target: Path, draft: Path, asked: list[Asked]
) -> None:
    check_drafts(
        drafted_by(draft, SHAPES[shape], method, target, asked),
        DraftModelFromScratch(draft, SHAPES[shape], is_sampled=method == "probabilistic"),
        asked,
        plain_outputs(target, asked),
    )


def observed_tokens_are_said_to_be_stored(patch: Patch) -> None:
    """A deliberate fault: the proposer reports tokens to the KV manager before it writes their keys and values."""
    observe = DraftModelProposer.observe

    def exaggerated(self: Any, observation: Any) -> None:
        ends = zip(observation.starts, observation.host_num_valid, strict=True)
        self._attention.fill(observation.requests, [start + num_valid for start, num_valid in ends])
        observe(self, observation)

    patch.setattr(DraftModelProposer, "observe", exaggerated)


def half_of_them_never_draft(request: Any) -> bool:
    """They would, until their prompt is computed: what is off from the start looks nothing up in the draft's cache."""
    is_off: bool = request.seed % 2 == 0 and request.num_computed > 0
    return is_off


@pytest.mark.parametrize(
    ("is_off", "fault"),
    [
        pytest.param(None, None, marks=pytest.mark.nightly),
        (off_now_and_then, None),
        (half_of_them_never_draft, None),
        (half_of_them_never_draft, observed_tokens_are_said_to_be_stored),
    ],
    ids=lambda value: value and value.__name__,
)
def test_cached_prefixes_and_steps_without_drafts_make_no_difference(
    is_off: Any, fault: Any, target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch
) -> None:
    if fault is not None:
        zero_the_cache(monkeypatch)
        fault(monkeypatch)
    some, shape = with_common_beginnings(asked[:80]), SHAPES["chain"]
    outcome = drafted_by(draft, shape, "greedy", target, some, kv_manager="prefix", is_off=is_off)
    scratch = DraftModelFromScratch(draft, shape, is_sampled=False)
    first = next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None)
    assert (first is not None) == (fault is not None), first
    assert outcome.num_cached > 300
    check_outputs(outcome, some, plain_outputs(target, some))


@pytest.mark.parametrize("window", [pytest.param(2, marks=pytest.mark.nightly), 7])
@pytest.mark.parametrize(("shape", "method"), [("chain", "greedy"), ("tree", "probabilistic")])
def test_drafts_with_a_window_are_those_computed_from_scratch(
    shape: str, method: str, window: int, target: Path, draft: Path, asked: list[Asked]
) -> None:
    few = asked[:60]
    outcome = drafted_by(draft, SHAPES[shape], method, target, few, draft_window=window)
    scratch = DraftModelFromScratch(draft, SHAPES[shape], is_sampled=method == "probabilistic", window=window)
    differing = list(mismatches(outcome, scratch, NUM_COMPARED))
    assert not differing, differing[:3]
    check_outputs(outcome, few, plain_outputs(target, few))


@pytest.mark.parametrize(("own", "window"), [(3, 9), (9, 3)])
def test_the_smaller_window_counts(own: int, window: int, target: Path, asked: list[Asked], tmp_path: Path) -> None:
    """If a draft model has a sliding window and the option draft_window is set, the smaller of the two applies."""
    (tmp_path / "llama").mkdir()
    llama = save_noisy(target, tmp_path / "llama", range(VOCAB_SIZE))
    with_window(reference.load(llama), own).save_pretrained(tmp_path / "mistral")
    few = asked[:40]
    outcome = drafted_by(tmp_path / "mistral", SHAPES["tree"], "greedy", target, few, draft_window=window)
    scratch = DraftModelFromScratch(llama, SHAPES["tree"], is_sampled=False, window=min(own, window))
    differing = list(mismatches(outcome, scratch, NUM_COMPARED))
    assert not differing, differing[:3]
    wrong = DraftModelFromScratch(llama, SHAPES["tree"], is_sampled=False, window=max(own, window))
    assert next(mismatches(outcome, wrong, NUM_COMPARED), None) is not None


@pytest.mark.parametrize("fault", WINDOW_FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_windows_are_noticed(
    fault: Any, target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    outcome = drafted_by(draft, SHAPES["tree"], "greedy", target, asked[:40], draft_window=4)
    scratch = DraftModelFromScratch(draft, SHAPES["tree"], is_sampled=False, window=4)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


def check_drafts(outcome: Outcome, scratch: DraftModelFromScratch, asked: list[Asked], plain: list[list[int]]) -> None:
    differing = list(mismatches(outcome, scratch, NUM_COMPARED))
    assert not differing, differing[:3]
    check_outputs(outcome, asked, plain)
    happened = what_happened(outcome) | {"plain steps": num_plain_steps(outcome)}
    del happened["no draft"]
    assert min(happened.values()) >= 3, happened


@pytest.mark.parametrize(
    ("shape", "method"), [pytest.param("chain", "greedy", marks=pytest.mark.nightly), ("tree", "probabilistic")]
)
def test_levels_of_a_fixed_size_make_the_same_drafts(
    shape: str, method: str, target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead = num_dead(monkeypatch)
    outcome = drafted_by(draft, SHAPES[shape], method, target, asked)
    monkeypatch.undo()
    scratch = DraftModelFromScratch(draft, SHAPES[shape], is_sampled=method == "probabilistic")
    check_drafts(outcome, scratch, asked, plain_outputs(target, asked))
    assert sum(dead) > 100


def test_dead_entries_that_overwrite_others_are_noticed(
    target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch
) -> None:
    fix_levels(monkeypatch)
    dead_entries_overwrite_the_slot_before_the_nodes(monkeypatch)
    outcome = drafted_by(draft, SHAPES["tree"], "greedy", target, asked[:60])
    scratch = DraftModelFromScratch(draft, SHAPES["tree"], is_sampled=False)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


@pytest.mark.parametrize(
    ("shape", "method"), [pytest.param("chain", "greedy", marks=pytest.mark.nightly), ("tree", "probabilistic")]
)
def test_drafts_in_other_words_are_those_computed_from_scratch(
    shape: str, method: str, in_other_words: tuple[Path, Path], asked: list[Asked]
) -> None:
    target, draft = in_other_words
    check_drafts(
        drafted_by(draft, SHAPES[shape], method, target, asked, use_heterogeneous_vocab=True),
        DraftModelFromScratch(draft, SHAPES[shape], is_sampled=method == "probabilistic", words=WORDS),
        asked,
        plain_outputs(target, asked),
    )


def counts_what_was_never_forwarded(patch: Patch) -> None:
    def settle(self: Any, num_accepted: int) -> None:
        self.num_tokens += num_accepted if self.num_levels else 0
        self.num_levels = 0

    patch.setattr(Stored, "settle", settle)


def forgets_plain_steps(patch: Patch) -> None:
    """A deliberate fault: all tokens that a request generated since its last draft count as accepted tokens of that
    draft, even those from steps without a draft."""
    propose = DraftModelProposer.propose

    def infer(self: Any, batch: Any) -> Any:
        for request in batch.requests:
            stored = self._stored[request.id]
            stored.settle(len(request.token_ids) - stored.num_tokens - 1)
        return propose(self, batch)

    patch.setattr(DraftModelProposer, "observe", lambda self, observation: None)
    patch.setattr(DraftModelProposer, "propose", infer)


def keeps_the_cache_of_a_preempted_request(patch: Patch) -> None:
    patch.setattr(DraftModelProposer, "reset", lambda self, request: None)


FAULTS = [
    counts_what_was_never_forwarded,
    forgets_plain_steps,
    keeps_the_cache_of_a_preempted_request,
    *PASS_FAULTS,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_noticed(
    fault: Any, target: Path, draft: Path, asked: list[Asked], monkeypatch: Patch, kv_manager: str
) -> None:
    if fault is keeps_the_cache_of_a_preempted_request and kv_manager == "prefix":
        pytest.skip("it finds the blocks that it had: its cache may be kept")
    fault(monkeypatch)
    shape = SHAPES["chain" if fault is counts_what_was_never_forwarded else "tree"]  # deep enough to be accepted whole
    outcome = drafted_by(draft, shape, "greedy", target, asked[:80], num_kv_blocks=32)  # many preemptions
    scratch = DraftModelFromScratch(draft, shape, is_sampled=False)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None


def reads_the_target_s_ids(shared: SharedVocabulary) -> SharedVocabulary:
    return evolve(shared, stand_in=np.arange(VOCAB_SIZE))


def reads_one_token_for_all_that_it_lacks(shared: SharedVocabulary) -> SharedVocabulary:
    stand_in = np.zeros_like(shared.stand_in)
    stand_in[shared.target_ids] = shared.draft_ids
    return evolve(shared, stand_in=stand_in)


def says_its_own_ids(shared: SharedVocabulary) -> SharedVocabulary:
    return evolve(shared, target_ids=shared.draft_ids)


def says_what_the_target_lacks(shared: SharedVocabulary) -> SharedVocabulary:
    return evolve(shared, draft_ids=np.arange(len(shared.draft_ids)))


@pytest.mark.parametrize(
    "fault",
    [reads_the_target_s_ids, reads_one_token_for_all_that_it_lacks, says_its_own_ids, says_what_the_target_lacks],
)
def test_faults_of_vocabularies_are_noticed(
    fault: Any, in_other_words: tuple[Path, Path], asked: list[Asked], monkeypatch: Patch
) -> None:
    target, draft = in_other_words
    by_text = SharedVocabulary.by_text
    monkeypatch.setattr(SharedVocabulary, "by_text", lambda *args: fault(by_text(*args)))
    few = asked[:40]
    outcome = drafted_by(draft, SHAPES["tree"], "greedy", target, few, use_heterogeneous_vocab=True)
    scratch = DraftModelFromScratch(draft, SHAPES["tree"], is_sampled=False, words=WORDS)
    assert next(mismatches(outcome, scratch, len(outcome.journal.drafts)), None) is not None
    check_outputs(outcome, few, plain_outputs(target, few))
