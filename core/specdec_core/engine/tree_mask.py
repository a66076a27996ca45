"""The attention mask of tree attention: the slots of the KV cache that each token of a forward pass attends to."""

from __future__ import annotations

import numpy as np

from specdec_core.contracts.draft import Draft


def tree_mask(
    draft: Draft, positions: np.ndarray, rows: np.ndarray, root_positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The tree attention mask in compact form: `Visibility`'s prefix_lens and more_slots.

    A known token attends to all slots up to its own. A node of a tree attends to the slots up to the root's, to its
    ancestors and to itself. A chain's attention is causal. A dead node attends to itself, or in a chain as the root
    does. Slots equal positions, except for the nodes of a tree and dead nodes: theirs follow the root's slot in order.
    """
    prefix_lens = positions + 1
    if draft.num_nodes == 0 or draft.is_chain:
        return prefix_lens, None
    layout = draft.host_layout
    root_slots = root_positions[layout.row_requests]
    above = np.arange(len(layout.up))
    slots = root_slots - layout.root_rows[layout.row_requests] + above  # of each root and node
    seen = np.empty((len(above), draft.max_depth), dtype=np.int64)
    for depth in range(draft.max_depth):  # `above` stays at a root, which is visible anyway, and at a dead node
        seen[:, depth] = slots[above]
        above = layout.up[above]
    more_slots = positions[:, None].repeat(draft.max_depth, axis=1)
    nodes = rows[layout.node_rows]
    prefix_lens[nodes] = np.where(layout.is_alive, root_slots[layout.node_rows] + 1, 0)
    more_slots[nodes] = seen[layout.node_rows]
    return prefix_lens, more_slots
