"""Grows the dynamic tree of EAGLE-2 on a GPU, without waiting for it."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.drafting.distributions import most_likely_of, to_target
from specdec_core.drafting.level import Level
from specdec_core.ops.upload import upload

IMPOSSIBLE = -torch.inf


class DeviceDynamicTree:
    """Grows the trees of `DynamicTree`, which takes the same arguments. No shape of a tensor depends on a token: what a
    request does not get is dead (padding), and `batch.levels` is not asked."""

    def __init__(
        self, batch: ProposerBatch, top_k: int, depth: int, q_to_target: torch.Tensor | None, min_prob: float
    ) -> None:
        self._budgets = np.array(batch.max_draft_tokens)
        self._size, self._device = len(self._budgets), batch.root_token_ids.device
        self._top_k, self._q_to_target, self._most_likely = top_k, q_to_target, most_likely_of(batch)
        self._least_score = float(np.log(min_prob)) if min_prob else torch.finfo(torch.float32).min
        self._levels_left = min(depth, int(self._budgets.max()) - 1)  # a node that is kept has all its ancestors kept
        self._host_requests = np.arange(self._size)
        self._requests = upload(self._host_requests, self._device)
        # For each level the nodes that were grown, [batch, n]: token ids; parents (index over all levels; -1: the
        # root); log probability of the path; of the token.
        self._grown: list[tuple[torch.Tensor, ...]] = []
        # The nodes to expand: the roots, then the top_k best of each request. Those with IMPOSSIBLE are dead.
        self._frontier = torch.full((self._size, 1), -1, device=self._device)
        self._frontier_scores = torch.zeros((self._size, 1), device=self._device)
        self._ancestors = torch.empty((self._size, 1, 0), dtype=torch.int64, device=self._device)
        self._num_grown = self._num_forwarded = 0  # of each request

    def grow(self, logits: torch.Tensor) -> Level | None:
        width, above_owner = self._frontier.shape[1], self._requests.unsqueeze(1)
        values, token_ids = self._most_likely(logits, self._top_k)
        values = values.masked_fill(values.isnan(), IMPOSSIBLE).view(self._size, width, -1)  # NaN: not finite
        num_children = values.shape[2]
        scores = (self._frontier_scores.unsqueeze(2) + values).flatten(1)
        token_ids = to_target(self._q_to_target, above_owner, token_ids.view(self._size, -1))
        parents = self._frontier.repeat_interleave(num_children, dim=1)
        self._grown.append((token_ids, parents, scores, values.flatten(1)))
        first, self._num_grown = self._num_grown, self._num_grown + scores.shape[1]
        if self._levels_left <= 0:
            return None
        self._levels_left -= 1

        chosen = _best(scores, self._top_k)
        above = chosen // num_children
        best = scores.gather(1, chosen)
        self._frontier = first + chosen
        self._frontier_scores = best.masked_fill(best[:, :1] < self._least_score, IMPOSSIBLE)
        return self._level(above_owner * width + above, above, token_ids.gather(1, chosen))

    def _level(self, rows: torch.Tensor, above: torch.Tensor, token_ids: torch.Tensor) -> Level:
        """Return the frontier (the nodes to expand next) as a `Level`. rows, above, token_ids: int64 [batch, n], the
        row of logits of each node's parent, the parent's index in the previous frontier, and the node's token."""
        count = above.shape[1]
        own = torch.arange(self._num_forwarded, self._num_forwarded + count, device=self._device)
        own = own.view(1, -1, 1).expand(self._size, -1, 1)
        path = above.unsqueeze(2).expand(-1, -1, self._ancestors.shape[2])
        is_alive = (self._frontier_scores > IMPOSSIBLE).unsqueeze(2)
        self._ancestors = torch.where(is_alive, torch.cat([self._ancestors.gather(1, path), own], dim=2), own)
        level = Level(
            width=count,
            requests=self._host_requests,
            rows=rows.flatten(),
            token_ids=token_ids.flatten(),
            ancestors=self._ancestors.flatten(0, 1),
            starts=(self._num_forwarded,) * self._size,
            is_chain=False,
            is_alive=is_alive.flatten(),
        )
        self._num_forwarded += count
        return level

    def build(self) -> Draft:
        token_ids, parents, scores, log_probs = (torch.cat(each, dim=1) for each in zip(*self._grown, strict=True))
        # No child is likelier than its parent, which is before it: so the parent of a kept node is kept.
        kept = _best(scores, int(self._budgets.max()))
        most, end = kept.shape[1], scores.shape[1]
        ranks, budgets = torch.arange(most, device=self._device), upload(self._budgets, self._device)
        is_kept = (ranks < budgets.unsqueeze(1)) & (scores.gather(1, kept) > IMPOSSIBLE)
        places = torch.where(is_kept, kept, end).sort(dim=1).values  # in the order in which they were grown
        numbers = torch.full((self._size, end + 1), -1, device=self._device)
        numbers = numbers.scatter(1, places, ranks.expand(self._size, -1))  # of each among those that are kept
        at = places.clamp(max=end - 1)
        above = parents.gather(1, at)
        above = torch.where(above < 0, -1, numbers.gather(1, above.clamp(min=0)))
        above = torch.where(places < end, above, DEAD)
        counts = np.minimum(self._budgets, most)
        nodes = upload(np.flatnonzero(np.arange(most) < counts[:, None]), self._device)

        def of_nodes(table: torch.Tensor) -> torch.Tensor:
            return table.flatten().index_select(0, nodes)

        return Draft(
            token_ids=of_nodes(token_ids.gather(1, at)),
            parents=of_nodes(above).to(torch.int32),
            offsets=tuple(accumulate(counts.tolist(), initial=0)),
            max_depth=len(self._grown),
            scores=of_nodes(log_probs.gather(1, at).exp()),
        )


def _best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return the indices of the `number` highest scores in each row of [batch, n], highest first. Of equal scores the
    first comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :number]
