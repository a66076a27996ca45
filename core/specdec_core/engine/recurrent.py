"""What the target's recurrent layers do in a step: which tokens change the states of which requests, and which states
draft tokens start from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.scheduler import Schedule
from specdec_core.engine.step_batch import StepBatch
from specdec_core.models.recurrent import Chunk, Level, RecurrentLayers, StatePlan
from specdec_core.ops.upload import upload


@frozen(eq=False)
class RequestStates:
    """Plans the states of requests, for the target's recurrent layers."""

    layers: RecurrentLayers
    device: torch.device

    def plan(self, schedule: Schedule, batch: StepBatch, draft: Draft) -> StatePlan:
        """Plan a forward pass. A request whose first token is computed starts from cleared states, whatever an earlier
        request, or the same one before it was preempted, has left."""
        store = self.layers.store
        slots, num_known = np.array(store.slots_of(schedule.request_ids)), np.array(schedule.num_known)
        store.clear([slot for slot, start in zip(slots.tolist(), batch.starts, strict=True) if start == 0])
        parts = zip(batch.token_offsets.tolist(), num_known.tolist(), slots.tolist(), strict=True)
        chunks = tuple(Chunk(*part) for part in parts if part[1] > 1)
        singles = num_known == 1
        roots = batch.token_offsets + num_known - 1
        node_rows = None
        levels: tuple[Level, ...] = ()
        if draft.num_nodes:
            rows, levels = self._levels(draft, roots, slots)
            node_rows = upload(rows, self.device)
        return StatePlan(chunks, self._level(roots[singles], slots[singles]), levels, node_rows)

    def replay(self, request_ids: Sequence[str], verdict: Verdict) -> None:
        """Let accepted nodes change the states of their requests. The verdict is on the host."""
        slots = np.array(self.layers.store.slots_of(request_ids))
        nodes = verdict.rows.numpy().astype(np.int64)[:, 1:] - np.arange(len(slots))[:, None] - 1  # in the draft
        num_accepted, steps = verdict.num_accepted.numpy(), []
        for j in range(num_accepted.max(initial=0)):
            is_longer = num_accepted > j
            steps.append(self._level(nodes[is_longer, j], slots[is_longer]))
        self.layers.replay([step for step in steps if step is not None])

    def _levels(self, draft: Draft, roots: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, tuple[Level, ...]]:
        """Return the rows of all nodes in the flat batch, int64 [num_nodes], and the live nodes by depth. Nodes follow
        their request's root."""
        layout = draft.host_layout
        requests, depths = layout.row_requests[layout.node_rows], layout.row_depths[layout.node_rows]
        rows = roots[requests] + layout.node_rows - layout.root_rows[requests]
        places = np.zeros(len(layout.up), dtype=np.int64)  # of each row's node, within its level
        levels = []
        for depth in range(1, int(depths.max()) + 1):
            nodes = (depths == depth).nonzero()[0]
            parents = slots[requests[nodes]] if depth == 1 else places[layout.parent_rows[nodes]]
            places[layout.node_rows[nodes]] = np.arange(len(nodes))
            levels.append(self._level(rows[nodes], parents))
        return rows, tuple(level for level in levels if level is not None)

    def _level(self, rows: np.ndarray, parents: np.ndarray) -> Level | None:
        """None if there are no tokens. rows, parents: int64 [num_tokens]."""
        num_tokens = len(rows)
        if not num_tokens:
            return None
        padding = np.zeros(self.layers.padded(num_tokens) - num_tokens, dtype=np.int64)
        order = np.concatenate([np.arange(num_tokens), padding])
        return Level(upload(rows[order], self.device), upload(parents[order], self.device), num_tokens)
