"""The tree attention mask: which slots of the KV cache each token of a forward pass sees."""

from __future__ import annotations

import numpy as np

from specdec_core.contracts.draft import Draft


def tree_mask(
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
