"""Checks drafts that are on a device, and copies them to the host.

All shapes are known on the host and no value is read back, so the checks can be part of a CUDA graph. Whether a draft
is wrong reaches the host together with the draft. Then `draft_check` checks the wrong draft again on the host, to find
the error message.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import DEAD, PER_NODE, Draft, HostCopy
from specdec_core.engine.draft_check import SUM_TOLERANCE
from specdec_core.ops.upload import upload


def read(draft: Draft, is_wrong: torch.Tensor) -> tuple[Draft, bool]:
    """Return the draft with `host_copies` of all its per-node tensors, and is_wrong. Those on a device are copied to
    the host in one transfer, which waits for the device."""
    missing = [tensor for name in PER_NODE if not draft.is_on_host(tensor := getattr(draft, name))]
    rows = [tensor.to(torch.float64) for tensor in (*missing, is_wrong.expand(draft.num_nodes))]  # exact for all
    *numbers, flags = torch.stack(rows).cpu()
    copies = (HostCopy(of, row.to(of.dtype).numpy()) for of, row in zip(missing, numbers, strict=True))
    return evolve(draft, host_copies=(*draft.host_copies, *copies)), bool(flags[0])


class DeviceChecks:
    """Checks drafts on their device. Tensors of draft token indices are kept there for the next draft, as long as the
    number of draft tokens per request stays the same."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._key: object = None
        self._places: _Places | None = None

    def is_wrong(self, draft: Draft) -> torch.Tensor:
        """Whether a draft breaks its contract (`contracts/draft.py`): bool [], on its device. draft: has draft tokens
        and passed `draft_check.check_form`."""
        found = _Faults(draft, self._places_of(draft), self._vocab_size)
        is_wrong = found.of_nodes | found.of_scores
        if draft.q is not None and draft.q_rows is not None:
            is_wrong = is_wrong | found.of_q(draft.q, draft.q_rows)
        return is_wrong

    def _places_of(self, draft: Draft) -> _Places:
        key = draft.offsets, draft.token_ids.device
        if self._places is None or key != self._key:
            self._key, self._places = key, _Places.of(draft)
        return self._places


@frozen(eq=False)
class _Places:
    """Each draft token's index in the batch and within its request, as tensors on the draft's device."""

    node: torch.Tensor  # int64 [num_nodes]   each node's index
    start: torch.Tensor  # int64 [num_nodes]   index of its request's first node
    index: torch.Tensor  # int64 [num_nodes]   index within the request
    most: int  # the most nodes of a request

    @classmethod
    def of(cls, draft: Draft) -> _Places:
        counts, device = draft.num_nodes_per_request, draft.token_ids.device
        node = np.arange(draft.num_nodes)
        start = np.repeat(draft.offsets[:-1], counts)
        places = upload(np.stack([node, start, node - start]), device)
        return cls(places[0], places[1], places[2], max(counts))


class _Faults:
    """Checks one draft on its device. The result of each check is a tensor, bool [], True if the draft is wrong."""

    def __init__(self, draft: Draft, places: _Places, vocab_size: int) -> None:
        self._draft, self._places, self._vocab_size = draft, places, vocab_size
        node, start, index = places.node, places.start, places.index
        token_ids, parents = draft.token_ids, draft.parents.to(torch.int64)
        is_node = (parents >= 0) & (parents < index)  # whether the parent is a node
        above = torch.where(is_node, start + parents, node)
        is_wrong = (token_ids < 0) | (token_ids >= vocab_size) | (parents < DEAD) | (parents >= index)
        up, steps = above, is_node.to(torch.int64)  # a child of the root, and a dead node, counts as its own parent
        for _ in range(places.most.bit_length()):  # each time twice as far up
            up, steps = up[up], steps + steps[up]
        self._is_alive = parents[up] == -1
        is_wrong |= self._is_alive & (steps >= draft.max_depth)
        if draft.is_chain:
            is_wrong |= self._is_alive & (parents != index - 1)
        self.of_nodes = is_wrong.any()
        # Equal for siblings, and for no others.
        self._family = torch.where(is_node, above, len(node) + start)
        self._token_ids = token_ids.clamp(0, vocab_size - 1)

    @property
    def of_scores(self) -> torch.Tensor:
        scores = self._draft.scores
        if scores is None:
            return torch.zeros_like(self.of_nodes)
        return (self._is_alive & ~((scores >= 0) & (scores <= 1))).any()  # NaN as well

    def of_q(self, q: torch.Tensor, q_rows: torch.Tensor) -> torch.Tensor:
        num_rows, device = len(q), q.device
        is_outside = ((q_rows < -1) | (q_rows >= num_rows)).any()
        if not q.numel():
            return is_outside | (self._is_alive & (q_rows >= 0)).any()
        is_sampled = self._is_alive & (q_rows >= 0)
        rows = q_rows.to(torch.int64).clamp(0, num_rows - 1)
        is_used = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)
        is_used = is_used.index_fill(0, torch.where(is_sampled, rows, num_rows), True)[:num_rows]
        is_distribution = (q.amin(dim=1) >= 0) & ((q.sum(dim=1) - 1).abs() <= SUM_TOLERANCE)  # False for NaN
        probs, vocabulary_is_wrong = self._drawn_probs(q, rows, is_used)
        return (
            is_outside
            | (is_used & ~is_distribution).any()
            | vocabulary_is_wrong
            | (is_sampled & ~(probs > 0)).any()
            | self._siblings_are_wrong(is_sampled, rows)
        )

    def _drawn_probs(
        self, q: torch.Tensor, rows: torch.Tensor, is_used: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the probability of each draft token in its row of `q`, float [num_nodes], and whether the token ids of
        q's columns are wrong, bool []. They are wrong if they are repeated or not in the vocabulary.

        rows: int64 [num_nodes], each draft token's row of `q`.
        is_used: bool [num_q_rows], whether a token was drawn from the row.
        """
        draft, token_ids, last = self._draft, self._token_ids, self._vocab_size - 1
        if draft.q_ids is not None:
            ids = draft.q_ids
            ordered = ids.sort(dim=1).values
            is_twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
            is_wrong = ((ids < 0) | (ids > last)).any() | (is_twice & is_used).any()
            is_it = ids[rows] == token_ids.unsqueeze(1)
            return torch.where(is_it, q[rows], 0).sum(dim=1), is_wrong
        if draft.q_to_target is None:
            return q[rows, token_ids], torch.zeros_like(self.of_nodes)
        mapping = draft.q_to_target
        ordered = mapping.sort().values
        is_wrong = ((mapping < 0) | (mapping > last)).any() | (ordered[1:] == ordered[:-1]).any()
        column = torch.full((self._vocab_size,), -1, device=q.device)
        column = column.scatter(0, mapping.clamp(0, last), torch.arange(len(mapping), device=q.device))[token_ids]
        return torch.where(column >= 0, q[rows, column.clamp(min=0)], 0), is_wrong

    def _siblings_are_wrong(self, is_sampled: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Whether siblings in a tree break the contract, bool []. Sampled siblings must come before deterministic
        ones and must share one row of `q`. If drawn without replacement, they must have different tokens.

        is_sampled: bool [num_nodes], whether the draft token was drawn from `q`.
        rows: int64 [num_nodes], each draft token's row of `q`.
        """
        family = torch.where(self._is_alive, self._family, -1 - self._places.node)  # dead nodes have no siblings
        order = family.argsort(stable=True)
        family, is_drawn, row = family[order], is_sampled[order], rows[order]
        differs = ~is_drawn[:-1] | (row[1:] != row[:-1])
        is_wrong = ((family[1:] == family[:-1]) & is_drawn[1:] & differs).any()
        if not self._draft.with_replacement:
            own = self._family * self._vocab_size + self._token_ids
            own = torch.where(is_sampled, own, -1 - self._places.node).sort().values
            is_wrong = is_wrong | (own[1:] == own[:-1]).any()
        return is_wrong
