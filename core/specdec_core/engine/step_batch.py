"""The flat batch of one pass, built from a schedule and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.kv import Visibility
from specdec_core.engine.scheduler import Schedule


def spread(draft: Draft, budgets: Sequence[int]) -> Draft:
    """A draft over the requests that have a budget, as a draft over all of them (empty trees for the others)."""
    if all(budgets):
        return draft
    drafted = iter(draft.num_nodes_per_request)
    counts = [next(drafted) if budget else 0 for budget in budgets]
    return evolve(draft, offsets=tuple(accumulate(counts, initial=0)))


@frozen(eq=False)
class StepBatch:
    """Each request's known tokens and then its nodes, one request after the other, padded at the end."""

    lengths: tuple[int, ...]  # [batch]   num_known + num_nodes
    token_offsets: np.ndarray  # int64 [batch]   where each request begins in the flat batch
    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    rows: torch.Tensor  # int64 [num_rows]   rows of the flat batch whose logits are to verify: root, nodes
    root_positions: torch.Tensor  # int64 [batch]
    visibility: Visibility

    @classmethod
    def of(cls, schedule: Schedule, draft: Draft, num_padded: int, device: torch.device) -> StepBatch:
        num_known = np.asarray(schedule.num_known)
        num_nodes = draft.num_nodes_per_request
        lengths = num_known + num_nodes
        offsets = lengths.cumsum() - lengths
        starts = np.array([request.num_computed for request in schedule.requests])
        roots = starts + num_known - 1
        token_ids = np.zeros(num_padded, dtype=np.int64)
        positions = np.zeros(num_padded, dtype=np.int64)
        for request, offset, start, known in zip(schedule.requests, offsets, starts, num_known, strict=True):
            token_ids[offset : offset + known] = request.token_ids[start : start + known]
            positions[offset : offset + known] = np.arange(start, start + known)

        layout = draft.host_layout
        rows = np.arange(len(layout.up)) + (offsets + num_known - 1 - layout.root_rows)[layout.row_requests]
        nodes = rows[layout.node_rows]
        token_ids[nodes] = draft.host_token_ids
        positions[nodes] = (roots[layout.row_requests] + layout.row_depths)[layout.node_rows]
        prefix_lens, more_slots = visibility_of(draft, positions, rows, roots)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        flat_positions = on_device(positions)
        return cls(
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


def visibility_of(
    draft: Draft, positions: np.ndarray, rows: np.ndarray, root_positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The tree attention mask in compact form: `Visibility`'s prefix_lens and more_slots.

    A known token sees the slots up to its own; a node those up to the root's, its ancestors and itself; a dead node
    itself, or in a chain, where attention is causal, what the root sees. A token's slot is its position, but for the
    nodes of a tree and dead ones: theirs follow the root's in their order.
    """
    prefix_lens = positions + 1
    if draft.num_nodes == 0 or draft.is_chain:
        return prefix_lens, None
    layout = draft.host_layout
    root_slots = root_positions[layout.row_requests]
    above = np.arange(len(layout.up))
    slots = root_slots - layout.root_rows[layout.row_requests] + above  # of each root and node
    seen = np.empty((len(above), draft.max_depth), dtype=np.int64)
    for depth in range(draft.max_depth):  # it stays at a root, whose slot is seen anyway, and at a dead node
        seen[:, depth] = slots[above]
        above = layout.up[above]
    more_slots = positions[:, None].repeat(draft.max_depth, axis=1)
    nodes = rows[layout.node_rows]
    prefix_lens[nodes] = np.where(layout.is_alive, root_slots[layout.node_rows] + 1, 0)
    more_slots[nodes] = seen[layout.node_rows]
    return prefix_lens, more_slots
