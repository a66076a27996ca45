"""The attention mask of tree attention: the KV-cache slots that each token of a forward pass attends to."""

from __future__ import annotations

import numpy as np

from specdec_core.contracts.draft import Draft


def tree_mask(
    draft: Draft, positions: np.ndarray, rows: np.ndarray, root_positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Compute the tree attention mask of a forward pass. A prompt or output token attends to all KV-cache slots up to
    its own. A draft token of a tree attends to the slots up to the root's, to its ancestors and to itself. In a chain,
    attention is causal. A dead (padding) node attends to itself, or in a chain to the slots that the root attends to.

    positions: int64 [num_tokens], the positions of the forward pass's tokens.
    rows: int64 [num_rows], indices of each request's root and draft tokens among these tokens. The root is the
        request's last token, which the tree grows from.
    root_positions: int64 [batch].

    Returns the mask in the compact form of `Visibility`: prefix_lens int64 [num_tokens] (a token attends to the
    KV-cache slots [0, prefix_len)) and more_slots int64 [num_tokens, max_depth], single slots beyond the prefix.
    more_slots is None if all drafts are chains or empty.

    A token's slot equals its position, except in trees: there, the slots of all draft tokens follow the root's slot in
    the order of the draft.
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
