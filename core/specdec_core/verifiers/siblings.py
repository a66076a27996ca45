"""For rejection sampling on trees: each node's children in order, and the distribution that each was drawn from."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft
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


class Proposals:
    """For each draft token, the draft distribution over the target's vocabulary that it was drawn from, given that its
    earlier siblings were rejected. A deterministic (not sampled) token has probability 1."""

    def __init__(self, draft: Draft, siblings: Siblings, vocab_size: int, dtype: torch.dtype) -> None:
        self._draft, self._siblings = draft, siblings
        self._vocab_size, self._dtype = vocab_size, dtype
        rows = draft.layout.node_rows
        self._token_ids = torch.zeros(siblings.end + 1, dtype=torch.int64, device=rows.device)
        self._token_ids[rows] = draft.token_ids
        self._q_rows = torch.full_like(self._token_ids, -1)
        if draft.q_rows is not None:
            self._q_rows[rows] = draft.q_rows.to(torch.int64)

    def token_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [n]   the draft tokens at these rows of target logits; arbitrary at other rows."""
        return self._token_ids[rows]

    def is_sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [n]   whether the draft tokens at these rows of target logits were sampled; False for roots and
        `Siblings.end`."""
        return self._q_rows[rows] >= 0

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocab]   distributions of the draft tokens at these rows of target logits; arbitrary at other rows."""
        tokens, q_rows = self.token_ids(rows).unsqueeze(1), self._q_rows[rows].unsqueeze(1)
        point = torch.zeros(len(rows), self._vocab_size, dtype=self._dtype, device=rows.device).scatter_(1, tokens, 1)
        q = self._draft.q
        if q is None or not len(q):
            return point
        drawn_from = q_rows.squeeze(1).clamp(min=0)
        drawn = self._over_target(q.to(self._dtype)[drawn_from], drawn_from)
        if not self._draft.with_replacement:
            drawn = self._without_earlier_siblings(drawn, rows)
        return torch.where(q_rows >= 0, drawn / drawn.sum(dim=1, keepdim=True), point)

    @cached_property
    def own_probs(self) -> torch.Tensor:
        """[num_rows + 1]   the draft probability of each draft token; 1 at other rows."""
        rows = self._draft.layout.node_rows
        probs = torch.ones(self._siblings.end + 1, dtype=self._dtype, device=rows.device)
        probs[rows] = self.of(rows).gather(1, self.token_ids(rows).unsqueeze(1)).squeeze(1)
        return probs

    def _over_target(self, drawn: torch.Tensor, q_rows: torch.Tensor) -> torch.Tensor:
        """Expand probabilities to the target's vocabulary, [n, vocab]. drawn: [n, draft_vocab or k], rows of `Draft.q`;
        q_rows: int64 [n], the indices of these rows in `Draft.q`."""
        q_ids, q_to_target = self._draft.q_ids, self._draft.q_to_target
        shape = len(drawn), self._vocab_size
        if q_ids is not None:
            return drawn.new_zeros(shape).scatter_(1, q_ids[q_rows], drawn)
        if q_to_target is not None:
            return drawn.new_zeros(shape).index_copy_(1, q_to_target, drawn)
        return drawn

    def _without_earlier_siblings(self, drawn: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sibling = self._siblings.previous_sibling[rows]
        for _ in range(self._siblings.most - 1):
            is_one = sibling != self._siblings.end
            if self._siblings.is_over(is_one):
                break
            token = self.token_ids(sibling).unsqueeze(1)
            drawn = drawn.scatter(1, token, torch.where(is_one.unsqueeze(1), 0, drawn.gather(1, token)))
            sibling = self._siblings.previous_sibling[sibling]
        return drawn


def residual(probs: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return max(0, probs - drawn), [n, vocab]: the target's probabilities that remain after a token drawn from `drawn`
    was rejected, not normalized. They sum to the probability of a rejection."""
    return (probs - drawn).clamp(min=0)


def normalize(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Return weights [n, vocab] divided by their sum. A row of zeros, which is reached with probability 0, becomes that
    of `otherwise`."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
