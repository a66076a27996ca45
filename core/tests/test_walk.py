"""Tokens are drawn along the accepted path only, with the same result on a (pretend) GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from naive_verifier import draft_of

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers import accepted_and_bonus, chosen
from specdec_core.verifiers.chosen import ChosenVerifier, draw_path
from specdec_testing.pretend_cuda import CUDA, PretendCuda

VOCAB = 3


class Recording(CounterRandom):
    """The engine's random source, which records the rows that it draws from."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drawn: list[tuple[int, int]] = []  # request and depth

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        assert len(weights) == len(requests) == len(depths)
        self.drawn += zip(requests.cpu().tolist(), depths.cpu().tolist(), strict=True)
        return super().target_token(weights, requests, depths)


def batches(number: int) -> list[tuple[Draft, torch.Tensor, int]]:
    rng, found = np.random.default_rng(0), []
    for seed in range(number):
        trees = []
        for _ in range(int(rng.integers(1, 6))):
            num_nodes = int(rng.integers(0, 20))
            parents = [int(rng.integers(max(-2, i - 6), i)) for i in range(num_nodes)]
            trees.append((rng.integers(VOCAB, size=num_nodes).tolist(), parents))
        draft = draft_of(trees)
        logits = torch.tensor(rng.normal(size=(draft.num_nodes + draft.batch_size, VOCAB)), dtype=torch.float32)
        logits[torch.from_numpy(rng.random(len(logits)) < 0.05)] = torch.nan
        found.append((draft, logits, seed))
    return found


def lists(verdict: Verdict) -> list[Any]:
    verdict = verdict.on_host()
    return [verdict.token_ids.tolist(), verdict.rows.tolist(), verdict.num_accepted.tolist()]


def verify(draft: Draft, logits: torch.Tensor, seed: int, device: torch.device | str = "cpu") -> tuple[Any, Recording]:
    positions = torch.arange(draft.batch_size).to(device)
    random = Recording([seed + b for b in range(draft.batch_size)], positions)
    return lists(ChosenVerifier().verify(logits.to(device), draft.to(device), random)), random


@pytest.fixture(autouse=True)
def walking(monkeypatch: pytest.MonkeyPatch) -> None:
    """However cheap it would be to draw at all rows."""
    monkeypatch.setattr(chosen, "MOST_IN_A_LEVEL", 0)


def test_a_path_s_rows_are_drawn_and_no_others() -> None:
    for draft, logits, seed in batches(40):
        (token_ids, rows, _), random = verify(draft, logits, seed)
        if not draft.num_nodes:
            continue
        on_path = [len(dict.fromkeys(of_request)) for of_request in rows]  # the last row repeats
        assert sorted(random.drawn) == [(b, depth) for b, n in enumerate(on_path) for depth in range(n)]
        assert len(token_ids) == draft.batch_size


def test_a_gpu_gets_the_same_verdict() -> None:
    for draft, logits, seed in batches(25):
        expected, _ = verify(draft, logits, seed)
        with PretendCuda():
            found, random = verify(draft, logits, seed, CUDA)
        assert found == expected
        assert len(random.drawn) == draft.batch_size * (draft.max_depth + 1), "its shapes depend on no drawn token"


def test_some_requests_of_a_batch_can_be_verified() -> None:
    for draft, logits, seed in batches(25):
        tokens, rows, accepted = verify(draft, logits, seed)[0]
        some = list(range(0, draft.batch_size, 2))
        random = CounterRandom([seed + b for b in range(draft.batch_size)], torch.arange(draft.batch_size))
        verdict = lists(draw_path(logits, draft, random, torch.tensor(some)))
        assert [[each[b] for b in some] for each in verdict] == [
            [each[b] for b in some] for each in (tokens, rows, accepted)
        ]
        others = [b for b in range(draft.batch_size) if b not in some]
        assert all(set(verdict[0][b]) == {-1} and verdict[2][b] == 0 for b in others)


def picks_at_the_root(pick: Callable[..., Any], draft: Draft) -> Callable[..., Any]:
    return lambda rows, requests, depths: pick(draft.layout.root_rows[requests], requests, depths)


def picks_one_deeper(pick: Callable[..., Any], draft: Draft) -> Callable[..., Any]:
    return lambda rows, requests, depths: pick(rows, requests, depths + 1)


def overlooks_nan(pick: Callable[..., Any], draft: Draft) -> Callable[..., Any]:
    return lambda *where: pick(*where).clamp(min=0)


def same_as_all_rows(number: int = 40) -> None:
    """Compare with `follow` after a draw at every row."""
    for draft, logits, seed in batches(number):
        layout = draft.layout
        random = CounterRandom([seed + b for b in range(draft.batch_size)], torch.arange(draft.batch_size))
        tokens = random.target_token(logits.softmax(-1), layout.row_requests, layout.row_depths)
        tokens = tokens.masked_fill(~logits.amax(-1).isfinite(), -1)
        expected = lists(accepted_and_bonus.follow(tokens, draft))
        assert verify(draft, logits, seed)[0] == expected


def test_drawing_along_the_path_equals_drawing_everywhere() -> None:
    same_as_all_rows()


@pytest.mark.parametrize("fault", [picks_at_the_root, picks_one_deeper, overlooks_nan])
def test_the_comparison_notices(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = accepted_and_bonus.walk

    def wrong(pick: Any, draft: Draft, requests: torch.Tensor) -> Verdict:
        return walk(fault(pick, draft), draft, requests)

    monkeypatch.setattr(chosen, "walk", wrong)
    with pytest.raises(AssertionError):
        same_as_all_rows()
