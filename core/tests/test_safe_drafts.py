"""Checking drafts on the device gives the same result as on the host, and the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings, strategies as st
from wrong_drafts import MOST, VOCAB, changed_somewhere, random_draft

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine import safe_draft
from specdec_core.engine.draft_check import check_draft
from specdec_core.engine.safe_draft import PendingCheck, SafeDrafts

CPU, META = torch.device("cpu"), torch.device("meta")


def is_wrong_on_the_host(draft: Draft) -> bool:
    try:
        check_draft(draft, [MOST] * draft.batch_size, VOCAB, CPU)
    except ValueError:
        return True
    return False


def draft_of(seed: int, num_changes: int) -> Draft:
    rng = np.random.default_rng(seed)
    draft = random_draft(rng)
    for _ in range(num_changes):
        draft = changed_somewhere(draft, rng)
    return draft


def check(draft: Draft) -> bool:
    """Return whether the check on the device finds the draft invalid.

    Asserts that the check on the host agrees, and that an invalid draft is replaced by one without invalid ids.
    """
    safe, flag = SafeDrafts(VOCAB).of(draft)
    assert (flag.dtype, flag.shape) == (torch.bool, ())
    assert bool(flag) == is_wrong_on_the_host(draft)
    if flag:
        assert safe.token_ids.unique().tolist() == [0]
        assert safe.parents.unique().tolist() == [DEAD]
        assert safe.q_rows is None or safe.q_rows.unique().tolist() == [-1]
    else:
        assert torch.equal(safe.token_ids, draft.token_ids)
        assert torch.equal(safe.parents, draft.parents)
        assert safe.q_rows is draft.q_rows or torch.equal(safe.q_rows, draft.q_rows)
    for name in ("q_ids", "q_to_target"):
        if (ids := getattr(safe, name)) is not None:
            assert bool(((ids >= 0) & (ids < VOCAB)).all())
            assert flag or not len(draft.q) or torch.equal(ids, getattr(draft, name))
    assert (safe.offsets, safe.max_depth, safe.is_chain) == (draft.offsets, draft.max_depth, draft.is_chain)
    return bool(flag)


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_changes=st.integers(0, 3))
def test_the_device_finds_what_the_host_finds(seed: int, num_changes: int) -> None:
    draft = draft_of(seed, num_changes)
    if draft.num_nodes:
        is_wrong = check(draft)
        assert num_changes or not is_wrong, "it was made to be right"


def test_many_are_right_and_many_are_wrong() -> None:
    drafts = [draft for seed in range(300) if (draft := draft_of(seed, 1)).num_nodes]
    assert 0.3 < np.mean([check(draft) for draft in drafts]) < 0.8


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_waited_for(seed: int) -> None:
    """The host never waits for a tensor value from the device. On the meta device, reading a value would raise."""
    draft = draft_of(seed, seed % 3)
    if draft.num_nodes:
        safe, flag = SafeDrafts(VOCAB).of(draft.to(META))
        assert (flag.device, safe.token_ids.shape) == (META, draft.token_ids.shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    for seed in range(200):
        if (draft := draft_of(seed, seed % 3)).num_nodes:
            there, drafts = draft.to(cuda), SafeDrafts(VOCAB)
            drafts._places_of(there)
            torch.cuda.set_sync_debug_mode("error")
            try:
                _, flag = drafts.of(there)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert bool(flag) == is_wrong_on_the_host(draft)


def test_places_are_uploaded_once_for_drafts_of_one_shape() -> None:
    drafts = SafeDrafts(VOCAB)
    first = Draft.from_chains([[1, 2], [3]])
    places = drafts._places_of(first)
    assert drafts._places_of(Draft.from_chains([[3, 2], [1]])) is places
    assert drafts._places_of(Draft.from_chains([[3], [2, 1]])) is not places
    assert drafts._places_of(first.to(META)).node.device == META


def test_nodes_that_the_host_has_read_stay_and_so_do_their_copies() -> None:
    draft = evolve(Draft.from_chains([[1, 2]]), q=torch.full((1, VOCAB), 0.5), q_rows=torch.tensor([0, -1]).int())
    there = draft.to(META)
    safe, _ = SafeDrafts(VOCAB).of(there, nodes_are_sound=True)
    assert safe.is_on_host(safe.token_ids, safe.parents)
    assert not safe.is_on_host(safe.q_rows)
    safe, flag = SafeDrafts(VOCAB).of(draft, nodes_are_sound=True)
    assert flag
    assert safe.token_ids is draft.token_ids
    assert safe.q_rows.tolist() == [-1, -1]


# What is left out is noticed


def nothing(*args: Any) -> torch.Tensor:
    return torch.tensor(False)


def without_siblings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safe_draft._Faults, "_siblings_are_wrong", nothing)


def without_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safe_draft, "SUM_TOLERANCE", 1e9)


def without_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safe_draft._Faults, "of_scores", nothing())


def without_what_columns_stand_for(patch: pytest.MonkeyPatch) -> None:
    drawn = safe_draft._Faults._drawn_probs
    patch.setattr(safe_draft._Faults, "_drawn_probs", lambda *args: (drawn(*args)[0], nothing()))


def without_drawn_tokens(patch: pytest.MonkeyPatch) -> None:
    drawn = safe_draft._Faults._drawn_probs
    patch.setattr(safe_draft._Faults, "_drawn_probs", lambda *args: (drawn(*args)[0] + 1, drawn(*args)[1]))


def one_step_up_only(patch: pytest.MonkeyPatch) -> None:
    of = safe_draft._Places.of
    patch.setattr(safe_draft._Places, "of", lambda draft: evolve(of(draft), most=1))


@pytest.mark.parametrize(
    "mutation",
    [
        without_siblings,
        without_sums,
        without_scores,
        without_what_columns_stand_for,
        without_drawn_tokens,
        one_step_up_only,
    ],
)
def test_a_gap_is_noticed(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [draft for seed in range(300) if (draft := draft_of(seed, 2)).num_nodes]
    expected = [is_wrong_on_the_host(draft) for draft in drafts]
    assert [bool(SafeDrafts(VOCAB).of(draft)[1]) for draft in drafts] == expected
    mutation(monkeypatch)
    assert [bool(SafeDrafts(VOCAB).of(draft)[1]) for draft in drafts] != expected


# The flag comes with the verdict


class Refused(Exception):  # noqa: N818
    pass


def refuse() -> Any:
    raise Refused


@pytest.mark.parametrize("is_wrong", [True, False])
def test_one_download_settles_a_doubt(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict and the result of the draft check are copied to the host together, in one copy. An invalid draft then
    raises."""
    given = Verdict(
        torch.tensor([[5, 6, -1], [7, -1, -1]]),
        torch.tensor([[0, 1, 1], [3, 3, 3]], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    downloads = []

    def cat(parts: list[torch.Tensor]) -> Any:
        packed = torch.concat([*[each.reshape(-1).to(torch.int64) for each in here], torch.tensor([int(is_wrong)])])
        assert [len(part) for part in parts] == [6, 6, 2, 1]
        downloads.append(packed)
        return packed

    here = (given.token_ids, given.rows, given.num_accepted)
    there = Verdict(*(each.to(META) for each in here))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", cat)
        check = PendingCheck(torch.tensor(is_wrong).to(META), refuse)
        if is_wrong:
            with pytest.raises(Refused):
                check.resolve(there)
            return
        found = check.resolve(there)
    assert len(downloads) == 1
    for name in ("token_ids", "rows", "num_accepted"):
        assert torch.equal(getattr(found, name), getattr(given, name)), name
        assert getattr(found, name).dtype == getattr(given, name).dtype


def test_a_doubt_about_a_verdict_on_the_host() -> None:
    verdict = Verdict(torch.tensor([[5]]), torch.tensor([[0]]).int(), torch.tensor([0]).int())
    assert PendingCheck(torch.tensor(False), refuse).resolve(verdict) is verdict
    with pytest.raises(Refused):
        PendingCheck(torch.tensor(True), refuse).resolve(verdict)
