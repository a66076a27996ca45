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

from specdec_core.contracts.draft import Draft
from specdec_core.engine import device_check
from specdec_core.engine.device_check import DeviceChecks, read
from specdec_core.engine.draft_check import check_draft
from specdec_testing.pretend_cuda import CUDA, PretendCuda

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
    """Return whether the check on the device finds the draft invalid. Asserts that the check on the host agrees."""
    flag = DeviceChecks(VOCAB).is_wrong(draft)
    assert (flag.dtype, flag.shape) == (torch.bool, ())
    assert bool(flag) == is_wrong_on_the_host(draft)
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
        assert DeviceChecks(VOCAB).is_wrong(draft.to(META)).device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    for seed in range(200):
        if (draft := draft_of(seed, seed % 3)).num_nodes:
            there, checks = draft.to(cuda), DeviceChecks(VOCAB)
            torch.cuda.set_sync_debug_mode("error")
            try:
                flag = checks.is_wrong(there)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert bool(flag) == is_wrong_on_the_host(draft)


def test_places_are_uploaded_once_for_drafts_of_one_shape() -> None:
    checks = DeviceChecks(VOCAB)
    first = Draft.from_chains([[1, 2], [3]])
    places = checks._places_of(first)
    assert checks._places_of(Draft.from_chains([[3, 2], [1]])) is places
    assert checks._places_of(Draft.from_chains([[3], [2, 1]])) is not places
    assert checks._places_of(first.to(META)).node.device == META


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_draft_and_its_check_are_read_in_one_copy(is_wrong: bool) -> None:
    draft = evolve(
        Draft.from_chains([[1, 2**31], [3]]),
        scores=torch.tensor([0.1, 0.7, 1e-30]),
        q_rows=torch.tensor([0, -1, -1]).int(),
    )
    with PretendCuda() as pretend:
        there = evolve(draft.to(CUDA), host_copies=())
        flag = torch.tensor(is_wrong).to(CUDA)
        before = len(pretend.waits)
        found, raised = read(there, flag)
        assert raised == is_wrong
        names = ("token_ids", "parents", "scores", "q_rows")
        copies = {name: found.on_host(getattr(found, name)) for name in names}
        assert len(pretend.waits) == before + 1
    for name, values in copies.items():
        expected = getattr(draft, name).numpy()
        assert values.dtype == expected.dtype
        assert values.tolist() == expected.tolist()


def test_what_the_host_knows_is_not_read() -> None:
    with PretendCuda():
        there = Draft.from_chains([[1, 2], [3]], CUDA)
        found, _ = read(there, torch.tensor(False).to(CUDA))
    assert found.host_copies == there.host_copies


# What is left out is noticed


def nothing(*args: Any) -> torch.Tensor:
    return torch.tensor(False)


def without_siblings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_check._Faults, "_siblings_are_wrong", nothing)


def without_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_check, "SUM_TOLERANCE", 1e9)


def without_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_check._Faults, "of_scores", nothing())


def without_what_columns_stand_for(patch: pytest.MonkeyPatch) -> None:
    drawn = device_check._Faults._drawn_probs
    patch.setattr(device_check._Faults, "_drawn_probs", lambda *args: (drawn(*args)[0], nothing()))


def without_drawn_tokens(patch: pytest.MonkeyPatch) -> None:
    drawn = device_check._Faults._drawn_probs
    patch.setattr(device_check._Faults, "_drawn_probs", lambda *args: (drawn(*args)[0] + 1, drawn(*args)[1]))


def one_step_up_only(patch: pytest.MonkeyPatch) -> None:
    of = device_check._Places.of
    patch.setattr(device_check._Places, "of", lambda draft: evolve(of(draft), most=1))


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
    assert [bool(DeviceChecks(VOCAB).is_wrong(draft)) for draft in drafts] == expected
    mutation(monkeypatch)
    assert [bool(DeviceChecks(VOCAB).is_wrong(draft)) for draft in drafts] != expected
