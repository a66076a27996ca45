"""Deliberate bugs in the history of a row of logits (the tokens before it). Tests must detect each bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from specdec_core import Draft
from specdec_core.ops.token_counts import TokenCounts
from specdec_core.sampling import bad_words, penalties
from specdec_core.sampling.constraints import ConstrainedRows, Constraints, Paths

Patch = pytest.MonkeyPatch


def paths_become(patch: Patch, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    class Wrong(Paths):
        @property
        def host_token_ids(self) -> np.ndarray:
            return change(self.draft, torch.from_numpy(Paths(self.draft).host_token_ids)).numpy()

    patch.setattr("specdec_core.sampling.constraints.Paths", Wrong)


def ancestors_are_missing(patch: Patch) -> None:
    def own_only(draft: Draft, path: torch.Tensor) -> torch.Tensor:
        return torch.cat([path[:, :1], torch.full_like(path[:, 1:], -1)], dim=1)

    paths_become(patch, own_only)


def the_row_s_own_node_is_missing(patch: Patch) -> None:
    def parents_only(draft: Draft, path: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(path[:, :1], -1), path[:, 1:]], dim=1)

    paths_become(patch, parents_only)


def a_sibling_is_counted(patch: Patch) -> None:
    def from_the_row_before(draft: Draft, path: torch.Tensor) -> torch.Tensor:
        wrong = path.clone()
        wrong[1:, :1] = torch.where(path[1:, :1] >= 0, path[:-1, :1], path[1:, :1])
        return wrong

    paths_become(patch, from_the_row_before)


def known_tokens_become(patch: Patch, change: Callable[[Any], Any]) -> None:
    of = ConstrainedRows.of.__func__

    def changed(cls: Any, requests: Any, draft: Draft) -> Any:
        return of(cls, [request and change(request) for request in requests], draft)

    patch.setattr(ConstrainedRows, "of", classmethod(changed))


@frozen
class Changed:
    constraints: Constraints
    token_ids: np.ndarray
    num_prompt_tokens: int


def the_root_is_missing(patch: Patch) -> None:
    known_tokens_become(patch, lambda r: Changed(r.constraints, r.token_ids[:-1], r.num_prompt_tokens))


def the_prompt_counts_as_output(patch: Patch) -> None:
    known_tokens_become(patch, lambda r: Changed(r.constraints, r.token_ids, 0))


def the_prompt_is_missing(patch: Patch) -> None:
    known_tokens_become(patch, lambda r: Changed(r.constraints, r.token_ids[r.num_prompt_tokens :], 0))


def presence_is_counted_in_the_prompt(patch: Patch) -> None:
    class Wrong(TokenCounts):
        def __init__(self, start: int, vocab_size: int, device: torch.device) -> None:
            super().__init__(0, vocab_size, device)

        def read(self, token_ids: np.ndarray, num_prompt_tokens: int) -> np.ndarray:
            return super().read(token_ids, 0)

    patch.setattr(penalties, "TokenCounts", Wrong)


def words_begin_in_the_prompt(patch: Patch) -> None:
    newest = bad_words._newest

    def wrong(rows: ConstrainedRows, count: int) -> torch.Tensor:
        changed = tuple(Changed(r.constraints, r.token_ids, 0) for r in rows.requests)
        return newest(evolve(rows, requests=changed), count)

    patch.setattr(bad_words, "_newest", wrong)
