"""Drafts from arrays are those from lists."""

from __future__ import annotations

import numpy as np
import torch

from specdec_core import Draft, DraftTree

TREES = [DraftTree([5, 6, 9], [-1, -1, 0]), DraftTree([], []), DraftTree([4], [-1])]


def test_from_arrays_is_from_trees() -> None:
    wanted = Draft.from_trees(TREES)
    draft = Draft.from_arrays(
        np.array([5, 6, 9, 4]),
        np.array([-1, -1, 0, -1], dtype=np.int32),
        [3, 0, 1],
        max_depth=2,
        scores=np.array([0.5, 0.25, 1, 1], dtype=np.float32),
    )
    assert (draft.offsets, draft.max_depth, draft.is_chain) == (wanted.offsets, wanted.max_depth, False)
    assert [draft.tree(i) for i in range(3)] == TREES
    assert (draft.token_ids.dtype, draft.parents.dtype) == (wanted.token_ids.dtype, wanted.parents.dtype)
    assert draft.scores is not None
    assert draft.scores.dtype == torch.float32


def test_from_arrays_shares_memory_on_a_cpu() -> None:
    token_ids = np.array([1, 2])
    draft = Draft.from_arrays(token_ids, np.array([-1, 0], dtype=np.int32), [2], 2, is_chain=True)
    token_ids[0] = 7
    assert draft.token_ids.tolist() == [7, 2]
