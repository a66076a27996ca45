"""The check of a draft sorts nothing of the draft vocabulary's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from specdec_core.contracts.draft import Draft
from specdec_core.engine.draft_check import check_draft

VOCAB, DRAFT_VOCAB = 4000, 1000


def sampled(mapping: torch.Tensor) -> Draft:
    q = torch.full((2, DRAFT_VOCAB), 1 / DRAFT_VOCAB)
    chain = Draft.from_chains([mapping[:2].tolist()])
    rows = torch.arange(2, dtype=torch.int32)
    return evolve(chain, q=q, q_rows=rows, q_to_target=mapping, with_replacement=False)


def test_a_table_of_tokens_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    for name in ("unique", "sort", "argsort"):
        function = getattr(np, name)

        def counted(values: Any, *rest: Any, _function: Any = function, **more: Any) -> Any:
            sizes.append(np.size(values))
            return _function(values, *rest, **more)

        monkeypatch.setattr(np, name, counted)
    check_draft(sampled(torch.arange(DRAFT_VOCAB) * 3), [2], VOCAB, torch.device("cpu"))
    assert sizes, "the small ones are seen"
    assert max(sizes) < 100


def test_a_token_that_the_table_names_twice_is_found() -> None:
    mapping = torch.arange(DRAFT_VOCAB) * 3
    mapping[500] = mapping[700]
    with pytest.raises(ValueError, match="names a token id twice"):
        check_draft(sampled(mapping), [2], VOCAB, torch.device("cpu"))
