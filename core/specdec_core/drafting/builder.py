"""Builds draft trees level by level from a draft model's logits, by taking the likeliest tokens or by sampling."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from specdec_core.config.draft_options import GREEDY
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.drafting.distributions import Distributions, draw_children
from specdec_core.ops.upload import upload


class Grown(NamedTuple):
    """Draft tokens (nodes) that one call of `DraftBuilder.grow` added, request by request."""

    parents: torch.Tensor  # int64 [n]   the row of the call below which the node was added
    nodes: torch.Tensor  # int64 [n]   the node's number within its request
    token_ids: torch.Tensor  # int64 [n]   of the target's vocabulary
    scores: torch.Tensor  # float32 [n]   the draft's own probability of each


class DraftBuilder:
    """Grows one tree of draft tokens (nodes) for each request of a batch.

    The number of nodes is limited before any token is drawn, since dropping a sampled token because of its value would
    change the output's distribution (docs/losslessness.md). To stop drafting for a request, leave it out of the next
    call of `grow`; that decision may depend on all tokens so far. A node whose logits are not finite gets no children.

    method: "greedy": a node's children are the likeliest next tokens. "probabilistic": children are drawn without
        replacement at the request's temperature, or chosen as with "greedy" if that is 0. "auto": they are drawn for
        requests in `batch.may_sample` only.
    q_to_target: int64 [draft_vocab] or [batch, draft_vocab], maps draft token ids to target token ids, for all requests
        or for each; None if they are the same.

    Attributes: is_sampled bool [batch], the requests whose nodes are drawn; room int64 [batch], how many more nodes
    each request may get.
    """

    def __init__(self, batch: ProposerBatch, method: str = GREEDY, q_to_target: torch.Tensor | None = None) -> None:
        self._batch = batch
        self._distributions = Distributions(batch, method, q_to_target)
        self.is_sampled = self._distributions.is_sampled
        self.room = upload(batch.max_draft_tokens, batch.root_token_ids.device)
        self._num_nodes = torch.zeros_like(self.room)
        self._num_keys = torch.zeros_like(self.room)  # of noise: one per draw, whether it became a node or not
        # Of each level: requests, parents (numbers within the request; -1: the root), token_ids, q_rows, scores.
        self._levels: list[tuple[torch.Tensor, ...]] = []

    def grow(
        self, logits: torch.Tensor, requests: torch.Tensor, parents: torch.Tensor, num_children: int | torch.Tensor = 1
    ) -> Grown:
        """Add up to num_children children to nodes that have none yet, or to roots (a request's last token).

        logits: float [n, draft_vocab], the draft model's logits after each of the n parents.
        requests: int64 [n], indices into the batch, ascending.
        parents: int64 [n], each parent's index within its request (`nodes` of an earlier call's result); -1: the root.
        num_children: one number for all parents, or int64 [n].
        """
        wanted = torch.as_tensor(num_children, device=requests.device).expand(len(requests))
        earlier = wanted.cumsum(0) - wanted
        before = earlier - earlier[torch.searchsorted(requests, requests)]  # of the request's earlier rows in this call
        allowed = torch.minimum(self.room[requests] - before, wanted.clamp(max=logits.shape[-1])).clamp(min=0)
        probs = self._distributions.probs(logits, requests)
        is_sound = probs[:, 0].isfinite()  # else the whole row is NaN
        allowed = allowed * is_sound
        most = int(allowed.max()) if len(allowed) else 0
        if not most:
            nothing = allowed.new_empty(0)
            return Grown(nothing, nothing, nothing, logits.new_empty(0))
        draws = self._distributions.draws
        if draws:
            probs = probs.masked_fill(~is_sound.unsqueeze(1), 0)
        columns = probs.argmax(dim=-1, keepdim=True) if most == 1 else probs.topk(most, dim=-1).indices
        exists = torch.arange(most, device=logits.device) < allowed.unsqueeze(1)
        q_rows = torch.full_like(requests, -1)
        if draws:
            # Rows; a slice copies nothing.
            drawn = slice(None) if self._distributions.draws_all else self.is_sampled[requests]
            q = probs[drawn]
            q_rows[drawn] = self._distributions.add(q, requests[drawn])
            keys = (self._num_keys[requests] + before)[drawn]
            columns[drawn], is_drawn = draw_children(self._batch.random, q, requests[drawn], keys, most)
            exists[drawn] &= is_drawn
            self._num_keys.index_add_(0, requests, wanted)

        row, child = exists.nonzero(as_tuple=True)
        column, request = columns[row, child], requests[row]
        nodes = self._num_nodes[request] + _rank(request)
        added = torch.bincount(request, minlength=len(self.room))
        self.room, self._num_nodes = self.room - added, self._num_nodes + added
        token_ids = self._distributions.to_target(request, column)
        scores = probs[row, column]
        self._levels.append((request, parents[row], token_ids, q_rows[row], scores))
        return Grown(row, nodes, token_ids, scores)

    def build(self) -> Draft:
        """Return the draft for all requests of the batch, with the draft model's probabilities as `scores`."""
        counts = self._num_nodes.tolist()
        if not any(counts):
            return Draft.from_chains([[]] * len(counts), self.room.device)
        requests, parents, token_ids, q_rows, scores = (torch.cat(each) for each in zip(*self._levels, strict=True))
        order = requests.argsort(stable=True)
        parents, fields = parents[order], self._distributions.fields()
        return Draft(
            token_ids=token_ids[order],
            parents=parents.to(torch.int32),
            offsets=tuple(accumulate(counts, initial=0)),
            max_depth=min(sum(len(level[0]) > 0 for level in self._levels), max(counts)),
            q_rows=None if fields["q"] is None else q_rows[order].to(torch.int32),
            scores=scores[order],
            is_chain=bool((parents == _rank(requests[order]) - 1).all()),
            **fields,
        )


def _rank(ascending: torch.Tensor) -> torch.Tensor:
    """For each entry of a sorted tensor, the number of equal entries before it: 0, 1, 0 for the tensor 3, 3, 5."""
    return torch.arange(len(ascending), device=ascending.device) - torch.searchsorted(ascending, ascending)
