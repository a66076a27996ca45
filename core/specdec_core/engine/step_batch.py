"""The input tensors of one forward pass, built from a schedule and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import Visibility
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.tree_mask import tree_mask
from specdec_core.ops.upload import upload


def spread(draft: Draft, budgets: Sequence[int]) -> Draft:
    """Extend a draft to all scheduled requests. Requests that the draft leaves out get empty trees.

    draft: has a tree only for the requests whose budget is above 0.
    budgets: [scheduled requests], the most draft tokens of each.
    """
    if all(budgets):
        return draft
    drafted = iter(draft.num_nodes_per_request)
    counts = [next(drafted) if budget else 0 for budget in budgets]
    return evolve(draft, offsets=tuple(accumulate(counts, initial=0)))


@frozen(eq=False)
class StepBatch:
    """The inputs of one forward pass, as one flat batch: for each request its next prompt or output tokens, then its
    draft tokens. Padding comes last."""

    starts: list[int]  # [batch]   each request's first position
    lengths: tuple[int, ...]  # [batch]   num_known + num_nodes
    token_offsets: np.ndarray  # int64 [batch]   where each request begins in the flat batch
    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    rows: torch.Tensor  # int64 [num_rows]   rows of the flat batch whose logits verification needs: roots and nodes
    root_positions: torch.Tensor  # int64 [batch]
    visibility: Visibility

    @classmethod
    def of(cls, schedule: Schedule, draft: Draft, num_padded: int, device: torch.device) -> StepBatch:
        num_known = np.asarray(schedule.num_known)
        num_nodes = draft.num_nodes_per_request
        lengths = num_known + num_nodes
        offsets = lengths.cumsum() - lengths
        starts = [request.num_computed for request in schedule.requests]
        first = np.array(starts)
        roots = first + num_known - 1
        token_ids = np.zeros(num_padded, dtype=np.int64)
        positions = np.zeros(num_padded, dtype=np.int64)
        if schedule.num_prefill_tokens:
            pairs = zip(schedule.requests, schedule.num_known, strict=True)
            before = num_known.cumsum() - num_known
            numbers = np.arange(num_known.sum())
            known = numbers + (offsets - before).repeat(num_known)
            token_ids[known] = np.concatenate([r.token_ids[r.num_computed : r.num_computed + n] for r, n in pairs])
            positions[known] = numbers + (first - before).repeat(num_known)
        else:  # the roots
            token_ids[offsets] = [request.last_token_id for request in schedule.requests]
            positions[offsets] = first

        rows = offsets + num_known - 1
        if draft.num_nodes:
            layout = draft.host_layout
            rows = np.arange(len(layout.up)) + (rows - layout.root_rows)[layout.row_requests]
            nodes = rows[layout.node_rows]
            token_ids[nodes] = draft.host_token_ids
            positions[nodes] = (roots[layout.row_requests] + layout.row_depths)[layout.node_rows]
        prefix_lens, more_slots = tree_mask(draft, positions, rows, roots)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return upload(array, device)

        flat_positions = on_device(positions)
        return cls(
            starts=starts,
            lengths=tuple(lengths.tolist()),
            token_offsets=offsets,
            token_ids=on_device(token_ids),
            positions=flat_positions,
            rows=on_device(rows),
            root_positions=on_device(roots),
            visibility=Visibility(
                flat_positions,
                on_device(prefix_lens),
                None if more_slots is None else on_device(more_slots),
                num_tree_slots=max(num_nodes, default=0),
            ),
        )
