"""Appends dead (padding) nodes to drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve

from specdec_core.contracts.draft import DEAD, Draft


def with_dead_tails(draft: Draft, num_nodes: Sequence[int]) -> Draft:
    """Append dead (padding) nodes to a batch of drafts, so that the draft of request i has num_nodes[i] nodes.

    The token, the score and the row of `q` of a dead node are arbitrary.
    """
    counts = [max(n, most) for n, most in zip(draft.num_nodes_per_request, num_nodes, strict=True)]
    requests = np.repeat(np.arange(draft.batch_size), counts)
    ends = np.cumsum(counts)
    index = np.arange(len(requests)) - (ends - counts)[requests]
    is_given = index < np.array(draft.num_nodes_per_request)[requests]

    def longer(tensor: torch.Tensor, value: float) -> torch.Tensor:
        found = torch.full((len(is_given),), value, dtype=tensor.dtype)
        found[torch.from_numpy(is_given)] = tensor
        return found

    return evolve(
        draft,
        token_ids=longer(draft.token_ids, 1),
        parents=longer(draft.parents, DEAD),
        offsets=(0, *ends.tolist()),
        max_depth=max(draft.max_depth, int(len(requests) > 0)),
        q_rows=None
        if draft.q_rows is None
        else longer(draft.q_rows, 0 if draft.q is not None and len(draft.q) else -1),
        scores=None if draft.scores is None else longer(draft.scores, float("nan")),
    )
