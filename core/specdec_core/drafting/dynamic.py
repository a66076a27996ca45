"""The dynamic tree of EAGLE-2 (Li et al. 2024, section 4): expand the likeliest nodes, keep the likeliest of all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from specdec_core.drafting.level import Level
from specdec_core.drafting.stop import Stopping
from specdec_core.types import Draft, ProposerBatch

IMPOSSIBLE = float("-inf")


class DynamicTree:
    """Grows the same number of candidates for every request, and keeps as many as its budget allows.

    At each level the top_k nodes that are likeliest, by the product of the draft's probabilities down to them, get
    their top_k likeliest children; depth times after the root's. What is kept are the likeliest of all candidates,
    in the order in which they came up. All are chosen. Nothing is kept where logits are not finite. Ties go to the
    candidate that came up first.

    q_to_target: see `DraftBuilder`. stopping: what `DraftStop.begin` returned: a request that is stopped has no more
    candidates, and of those it has, none are kept that are not worth verifying.
    """

    def __init__(
        self,
        batch: ProposerBatch,
        top_k: int,
        depth: int,
        q_to_target: torch.Tensor | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self._budgets = batch.max_draft_tokens
        self._size, self._device = len(self._budgets), batch.root_token_ids.device
        self._top_k, self._q_to_target, self._stopping = top_k, q_to_target, stopping
        self._roots = range(self._size) if stopping is None else stopping.drafting
        self._requests = torch.arange(self._size, device=self._device)
        self._growing: Sequence[int] = self._roots  # requests that have not been stopped
        self._levels_left = min(depth, max(self._budgets) - 1)  # a node that is kept has all its ancestors kept
        # Candidates of each level: [batch, n], n = top_k at first and its square later.
        self._token_ids: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []  # which candidate, over all levels; -1: the root
        self._scores: list[torch.Tensor] = []  # log of the probability of the whole path
        self._log_probs: list[torch.Tensor] = []  # of the token alone
        self._num_candidates = 0
        # What is to be expanded: the roots, then top_k candidates of each request.
        self._frontier = torch.full((self._size, 1), -1, device=self._device)
        self._frontier_scores = torch.zeros(self._size, 1, device=self._device)
        self._ancestors = torch.empty(self._size, 1, 0, dtype=torch.int64, device=self._device)
        self._num_forwarded = 0  # nodes of each request

    @property
    def roots(self) -> Sequence[int]:
        return self._roots

    def grow(self, logits: torch.Tensor) -> Level | None:
        if not self._growing:
            return None
        num_rows = self._frontier.shape[1]
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32).view(len(self._growing), num_rows, -1)
        best = log_probs.topk(min(self._top_k, logits.shape[-1]), dim=-1)
        num_children = best.indices.shape[2]
        likeliest = best.values.nan_to_num(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE)  # a row that is not finite is all NaN
        values, columns = self._of_all(likeliest, IMPOSSIBLE), self._of_all(best.indices, 0).flatten(1)
        scores = (self._frontier_scores.unsqueeze(2) + values).flatten(1)
        token_ids = columns if self._q_to_target is None else self._q_to_target[columns]
        self._token_ids.append(token_ids)
        self._parents.append(self._frontier.repeat_interleave(num_children, dim=1))
        self._scores.append(scores)
        self._log_probs.append(values.flatten(1))
        first, self._num_candidates = self._num_candidates, self._num_candidates + scores.shape[1]
        if self._levels_left == 0:
            return None
        self._levels_left -= 1

        self._frontier_scores, chosen = _best(scores, self._top_k)
        self._frontier = first + chosen
        count = chosen.shape[1]
        own = torch.arange(self._num_forwarded, self._num_forwarded + count, device=self._device)
        rows = chosen // num_children
        above = self._ancestors.gather(1, rows.unsqueeze(2).expand(-1, -1, self._ancestors.shape[2]))
        self._ancestors = torch.cat([above, own.view(1, -1, 1).expand(self._size, -1, 1)], dim=2)
        rows = self._of_growing(rows)
        if len(rows) > 1:
            rows = rows + num_rows * torch.arange(len(rows), device=self._device).unsqueeze(1)
        if self._stopping is not None:
            own_log_probs = self._log_probs[-1].gather(1, chosen)
            goes = self._goes_on(self._stopping, rows, self._of_growing(own_log_probs).exp())
            rows = rows[goes]
            self._growing = [request for request, goes_on in zip(self._growing, goes, strict=True) if goes_on]
            if not self._growing:
                return None
        counts = [0] * self._size
        for request in self._growing:
            counts[request] = count
        level = Level(
            requests=self._of_growing(self._requests).unsqueeze(1).expand(-1, count).flatten(),
            rows=rows.flatten(),
            token_ids=self._of_growing(token_ids.gather(1, chosen)).flatten(),
            ancestors=self._of_growing(self._ancestors).flatten(0, 1),
            starts=(self._num_forwarded,) * self._size,
            counts=tuple(counts),
            is_chain=self._top_k == 1,
        )
        self._num_forwarded += count
        return level

    def build(self) -> Draft:
        """The draft over all requests of the batch. `scores` are the draft's own probabilities."""
        draft = self._likeliest()
        return draft if self._stopping is None else self._stopping.keep(draft, in_place=False)

    def _of_growing(self, of_all: torch.Tensor) -> torch.Tensor:
        """[num_growing, ...] of [batch, ...]."""
        return of_all if len(self._growing) == self._size else of_all[list(self._growing)]

    def _of_all(self, of_growing: torch.Tensor, otherwise: float) -> torch.Tensor:
        """[batch, ...] of [num_growing, ...]."""
        if len(self._growing) == self._size:
            return of_growing
        found = of_growing.new_full((self._size, *of_growing.shape[1:]), otherwise)
        found[list(self._growing)] = of_growing
        return found

    def _goes_on(self, stopping: Stopping, rows: torch.Tensor, probs: torch.Tensor) -> list[bool]:
        """[num_growing]   rows and probs [num_growing, n]: of the nodes that would be expanded."""
        requests = torch.tensor(self._growing, device=self._device).repeat_interleave(rows.shape[1])
        is_first_draw = torch.zeros_like(requests, dtype=torch.bool)
        num_nodes = torch.ones(self._size, dtype=torch.int64, device=self._device)  # those not worth it go, at the end
        goes = stopping.goes_on(requests, rows.flatten(), probs.flatten(), is_first_draw, num_nodes).tolist()
        return [goes[request] for request in self._growing]

    def _likeliest(self) -> Draft:
        if not self._scores:
            return Draft.from_chains([[]] * self._size, self._device)
        token_ids, parents, scores, log_probs = (
            torch.cat(each, dim=1) for each in (self._token_ids, self._parents, self._scores, self._log_probs)
        )
        # No child is likelier than its parent, which came up before it: whoever is kept has its parent kept.
        kept_scores, kept = _best(scores, max(self._budgets))
        budgets = torch.tensor(self._budgets, device=self._device).unsqueeze(1)
        is_kept = (torch.arange(kept.shape[1], device=self._device) < budgets) & (kept_scores > IMPOSSIBLE)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, kept, is_kept)
        number = mask.cumsum(1) - 1  # of each candidate among those that are kept
        parent_numbers = number.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)
        counts = mask.sum(dim=1).tolist()
        places = mask.flatten().nonzero().squeeze(1)
        deepest = int((places % mask.shape[1]).max()) if any(counts) else -1  # candidates are in the order of levels
        ends = accumulate(each.shape[1] for each in self._scores)
        return Draft(
            token_ids=token_ids.flatten()[places],
            parents=parent_numbers.flatten()[places].to(torch.int32),
            offsets=tuple(accumulate(counts, initial=0)),
            max_depth=bisect_right([0, *ends], deepest),
            scores=log_probs.flatten()[places].exp(),
            is_chain=self._top_k == 1,
        )


def _best(scores: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest scores [batch, n] and where they are, the first ones among equals."""
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :number], indices[:, :number]
