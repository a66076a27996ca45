"""The flat batch of one pass, built from a schedule and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.engine.scheduler import Schedule
from specdec_core.types import Draft, Observation, Verdict, Visibility


def spread(draft: Draft, budgets: Sequence[int]) -> Draft:
    """A draft over the requests that have a budget, as a draft over all of them (empty trees for the others)."""
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
        num_nodes = np.asarray(draft.num_nodes_per_request)
        lengths = num_known + num_nodes
        offsets = np.cumsum(lengths) - lengths
        starts = np.array([request.num_computed for request in schedule.requests])
        roots = starts + num_known - 1

        token_ids = np.zeros(num_padded, dtype=np.int64)
        positions = np.zeros(num_padded, dtype=np.int64)
        for request, offset, start, known in zip(schedule.requests, offsets, starts, num_known, strict=True):
            token_ids[offset : offset + known] = request.token_ids[start : start + known]
            positions[offset : offset + known] = np.arange(start, start + known)

        first_rows = np.asarray(draft.offsets[:-1]) + np.arange(len(lengths))
        row_requests = np.repeat(np.arange(len(lengths)), num_nodes + 1)
        rows = np.arange(len(row_requests)) + (offsets + num_known - 1 - first_rows)[row_requests]

        flat_tokens = torch.from_numpy(token_ids).to(device)
        flat_positions = torch.from_numpy(positions).to(device)
        flat_rows = torch.from_numpy(rows).to(device)
        root_positions = torch.from_numpy(roots).to(device)
        if draft.num_nodes:
            layout = draft.layout
            nodes = flat_rows[layout.node_rows]
            flat_tokens[nodes] = draft.token_ids
            flat_positions[nodes] = (root_positions[layout.row_requests] + layout.row_depths)[layout.node_rows]
        return cls(
            lengths=tuple(lengths.tolist()),
            token_offsets=offsets,
            token_ids=flat_tokens,
            positions=flat_positions,
            rows=flat_rows,
            root_positions=root_positions,
            visibility=see(draft, flat_positions, flat_rows, root_positions),
        )


def see(draft: Draft, positions: torch.Tensor, rows: torch.Tensor, root_positions: torch.Tensor) -> Visibility:
    """A known token sees the slots up to its own; a node those up to the root's, its ancestors and itself; a dead node
    itself. A token's slot is its position, but for the nodes of a tree: theirs follow the root's in their order."""
    if draft.num_nodes == 0 or draft.is_chain:
        return Visibility(positions, positions + 1)
    layout = draft.layout
    all_rows = torch.arange(len(layout.up), device=rows.device)
    slots = (root_positions - layout.root_rows)[layout.row_requests] + all_rows  # of each root and node
    up = [all_rows]
    for _ in range(draft.max_depth - 1):  # it stays at a root, whose slot is seen anyway, and at a dead node
        up.append(layout.up[up[-1]])
    seen = torch.stack([slots[rows_above] for rows_above in up], dim=1)

    prefix_lens, more_slots = positions + 1, positions.unsqueeze(1).repeat(1, draft.max_depth)
    nodes = rows[layout.node_rows]
    node_prefix = torch.where(layout.is_alive, root_positions[layout.row_requests[layout.node_rows]] + 1, 0)
    prefix_lens[nodes], more_slots[nodes] = node_prefix, seen[layout.node_rows]
    return Visibility(positions, prefix_lens, more_slots)


def observe(
    schedule: Schedule, batch: StepBatch, draft: Draft, verdict: Verdict, features: dict[str, torch.Tensor]
) -> Observation:
    """What the pass made final: the known tokens and the accepted nodes of each request, with their features."""
    device = batch.token_ids.device
    num_known = np.asarray(schedule.num_known)
    counts = num_known + np.minimum(np.asarray(draft.num_nodes_per_request), draft.max_depth)
    offsets = np.cumsum(counts) - counts
    requests = np.repeat(np.arange(len(counts)), counts)
    local = np.arange(len(requests)) - offsets[requests]
    accepted = torch.from_numpy(np.maximum(local - num_known[requests] + 1, 0)).to(device)  # 0: a known token
    first = batch.token_offsets[requests] + np.minimum(local, num_known[requests] - 1)  # known token, or the root

    of_request = torch.from_numpy(requests).to(device)
    nodes_down = verdict.rows[of_request, accepted] - verdict.rows[of_request, 0]
    tokens = torch.from_numpy(first).to(device) + nodes_down

    # Where the next token is known already, the verdict says nothing.
    following = [
        int(request.token_ids[end]) if (end := request.num_computed + known) < request.num_tokens else -1
        for request, known in zip(schedule.requests, schedule.num_known, strict=True)
    ]
    known_next = torch.tensor(following, device=device)
    decided = verdict.token_ids.gather(1, verdict.num_accepted.to(torch.int64).unsqueeze(1)).squeeze(1)
    num_valid = verdict.num_accepted + torch.from_numpy(num_known).to(device, torch.int32)
    return Observation(
        requests=tuple(schedule.requests),
        starts=tuple(request.num_computed for request in schedule.requests),
        offsets=tuple(accumulate(counts.tolist(), initial=0)),
        num_valid=torch.where(decided >= 0, num_valid, 0),
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        features={tap: feature[tokens] for tap, feature in features.items()},
        next_token_ids=torch.where(known_next >= 0, known_next, decided).clamp(min=0),
    )
