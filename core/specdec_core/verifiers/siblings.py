"""For rejection sampling on trees: each node's children in order, and a draft's distributions as the operation
`residuals` gets them."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft
from specdec_core.ops.residuals import Proposals
from specdec_core.ops.upload import upload


@frozen(eq=False)
class Siblings:
    """A draft's trees as linked lists of children, without dead (padding) nodes. `first_child`, `next_sibling` and
    `previous_sibling` map a row of target logits (one per root and per draft token, as in `contracts.draft`) to another
    row. `end`, one past the last row, stands for "no row" and is mapped to itself."""

    end: int
    most: int  # children of a node
    root_rows: torch.Tensor  # int64 [batch]   noise is keyed by row - root row, the same in any batch
    first_child: torch.Tensor  # int64 [num_rows + 1]
    next_sibling: torch.Tensor  # int64 [num_rows + 1]
    previous_sibling: torch.Tensor  # int64 [num_rows + 1]

    @classmethod
    def of(cls, draft: Draft) -> Siblings:
        layout = draft.host_layout
        end = len(layout.row_requests)
        rows, parents = layout.node_rows[layout.is_alive], layout.parent_rows[layout.is_alive]
        order = parents.argsort(kind="stable")
        rows, parents = rows[order], parents[order]
        is_first = np.diff(parents, prepend=-1) > 0
        links = np.full((3, end + 1), end)
        first_child, next_sibling, previous_sibling = links
        first_child[parents[is_first]] = rows[is_first]
        later, earlier = rows[1:][~is_first[1:]], rows[:-1][~is_first[1:]]
        next_sibling[earlier], previous_sibling[later] = later, earlier
        most = int(np.bincount(parents).max()) if len(parents) else 0
        return cls(end, most, draft.layout.root_rows, *upload(links, draft.token_ids.device))

    def is_over(self, is_going: torch.Tensor) -> bool:
        """Whether nothing goes on. is_going: bool [n]. Always False on a GPU, where the host would have to wait for the
        answer: further rounds of a loop must have no effect on what does not go on."""
        return is_going.device.type == "cpu" and not bool(is_going.any())


def proposals_of(draft: Draft, siblings: Siblings, vocab_size: int) -> Proposals:
    """Describe a draft for the operation `residuals`. vocab_size: of the target."""
    layout, end = draft.layout, siblings.end
    rows = layout.node_rows
    token_ids, q_rows = rows.new_zeros(end + 1), rows.new_full((end + 1,), -1)
    token_ids[rows] = draft.token_ids
    parent_rows = torch.full_like(token_ids, end)
    parent_rows[rows] = layout.parent_rows
    if draft.q_rows is not None:
        q_rows[rows] = draft.q_rows.to(torch.int64)
    most_earlier = 0 if draft.with_replacement else max(0, siblings.most - 1)
    earlier, sibling = rows.new_empty(end + 1, most_earlier), siblings.previous_sibling
    for i in range(most_earlier):
        earlier[:, i] = sibling
        sibling = siblings.previous_sibling[sibling]
    return Proposals(
        end=end,
        vocab_size=vocab_size,
        token_ids=token_ids,
        parent_rows=parent_rows,
        q_rows=q_rows,
        earlier=earlier,
        q=draft.q,
        q_to_target=draft.q_to_target,
        q_ids=draft.q_ids,
    )
