"""The dynamic tree of EAGLE-2 (Li et al. 2024, section 4): expand the likeliest nodes, keep the likeliest of all."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.drafting.device_dynamic import DeviceDynamicTree
from specdec_core.drafting.distributions import most_likely_of, to_target
from specdec_core.drafting.level import Level, TreeGrower, may_shrink, on_host

IMPOSSIBLE = np.float32(-np.inf)
LEAST = np.finfo(np.float32).min


def dynamic_grower_of(
    batch: ProposerBatch, top_k: int, depth: int, q_to_target: torch.Tensor | None = None, min_prob: float = 0.0
) -> TreeGrower:
    """Begin drafts that are dynamic trees: see `DynamicTree`, which takes the same arguments."""
    kind = DynamicTree if may_shrink(batch.root_token_ids.device) else DeviceDynamicTree
    return kind(batch, top_k, depth, q_to_target, min_prob)


class DynamicTree:
    """Grows equally many draft tokens (nodes) for every request on a CPU, and keeps the likeliest max_draft_tokens.

    The root (a request's last token) gets its top_k likeliest children. In each of `depth` further levels, the top_k
    likeliest nodes of the level before get their top_k likeliest children. A node's likelihood is the probability of
    its path from the root. The nodes that are kept stay in the order in which they were grown; of equally likely nodes,
    the one grown first is kept. No token is sampled. A node whose logits are not finite keeps no children. A request
    that `batch.levels` stops gets no more nodes.

    q_to_target: int64 [draft_vocab] or [batch, draft_vocab], maps draft token ids to target token ids, for all requests
        or for each; None if they are the same.
    min_prob: a request gets no more nodes once all paths to its newest nodes have a lower probability than this.
    """

    def __init__(
        self, batch: ProposerBatch, top_k: int, depth: int, q_to_target: torch.Tensor | None, min_prob: float
    ) -> None:
        self._budgets = batch.max_draft_tokens
        self._size, self._device = len(self._budgets), batch.root_token_ids.device
        self._top_k, self._q_to_target, self._levels = top_k, q_to_target, batch.levels
        self._most_likely = most_likely_of(batch)
        self._growing = np.arange(self._size)  # requests that levels are about
        self._goes = np.ones(len(self._growing), dtype=bool)  # which of them have not been stopped
        self._each = np.arange(self._size)[:, None]  # row index for arrays [batch, n]
        self._least_score = np.log(min_prob) if min_prob else LEAST
        self._levels_left = min(depth, max(self._budgets) - 1)  # a node that is kept has all its ancestors kept
        # For each level, on the host, the nodes that were grown, [batch, n], with n = top_k at first and its square
        # later: token ids; parents (index over all levels; -1: the root); log probability of the path; of the token.
        self._grown: list[tuple[np.ndarray, ...]] = []
        self._num_grown = 0
        # The nodes to expand: the roots, then top_k nodes of each request.
        self._frontier = np.full((self._size, 1), -1)
        self._frontier_scores = np.zeros((self._size, 1), dtype=np.float32)
        self._ancestors = np.empty((self._size, 1, 0), dtype=np.int64)
        self._num_forwarded = 0  # nodes of each request

    def grow(self, logits: torch.Tensor) -> Level | None:
        width = self._frontier.shape[1]
        values, token_ids = self._best_children(logits)
        num_children = values.shape[2]
        scores = (self._frontier_scores[:, :, None] + values).reshape(self._size, -1)
        log_probs = values.reshape(self._size, -1)
        self._grown.append((token_ids, self._frontier.repeat(num_children, axis=1), scores, log_probs))
        first, self._num_grown = self._num_grown, self._num_grown + scores.shape[1]
        if self._levels_left <= 0:
            return None
        self._levels_left -= 1

        chosen = _best(scores, self._top_k)
        above = chosen // num_children
        self._frontier, self._frontier_scores = first + chosen, scores[self._each, chosen]
        goes = self._goes_on(above, width, log_probs[self._each, chosen])
        if not goes.any():
            return None
        rows = self._of_growing(above)
        rows = rows + width * np.arange(len(rows))[:, None]
        if not goes.all():
            rows, self._growing, goes = rows[goes], self._growing[goes], goes[goes]
        self._goes = goes
        return self._level(rows, above, token_ids[self._each, chosen])

    def _level(self, rows: np.ndarray, above: np.ndarray, token_ids: np.ndarray) -> Level:
        """Return the frontier (the nodes to expand next) as a `Level`, the input of the next forward pass.

        rows: int64 [num_growing, n], the row of logits from which each node was grown.
        above: int64 [batch, n], the index of each node's parent in the previous frontier.
        token_ids: int64 [batch, n].
        """
        count = above.shape[1]
        own = np.arange(self._num_forwarded, self._num_forwarded + count)
        ancestors = np.empty((*above.shape, self._ancestors.shape[2] + 1), dtype=np.int64)
        ancestors[:, :, :-1] = self._ancestors[self._each, above]
        ancestors[:, :, -1] = own
        is_alive = None
        scores = self._of_growing(self._frontier_scores)
        if scores[:, -1].min() == IMPOSSIBLE:  # the last one is the least likely
            is_dead = self._frontier_scores == IMPOSSIBLE
            ancestors = np.where(is_dead[:, :, None], own[:, None], ancestors)
            is_alive = torch.from_numpy((scores > IMPOSSIBLE).ravel())
        self._ancestors = ancestors
        level = Level(
            width=count,
            requests=self._growing,
            rows=torch.from_numpy(rows.ravel()),
            token_ids=torch.from_numpy(self._of_growing(token_ids).ravel()),
            ancestors=torch.from_numpy(self._of_growing(ancestors).reshape(-1, ancestors.shape[2])),
            starts=(self._num_forwarded,) * self._size,
            is_chain=False,
            is_alive=is_alive,
        )
        self._num_forwarded += count
        return level

    def _best_children(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest children of each node of the frontier (the nodes to expand).

        Returns log probabilities [batch, width, num_children], IMPOSSIBLE for stopped requests, and token ids [batch,
        width * num_children].
        """
        values, token_ids = self._most_likely(logits, self._top_k)
        scores = on_host(values).reshape(len(self._growing), self._frontier.shape[1], -1)
        scores = np.fmax(scores, IMPOSSIBLE)  # a row that is not finite is all NaN, which fmax leaves out
        if not self._goes.all():
            scores[~self._goes] = IMPOSSIBLE
        owners = torch.from_numpy(self._growing[:, None])
        ids = on_host(to_target(self._q_to_target, owners, token_ids.view(len(self._growing), -1)))
        return self._of_all(scores, IMPOSSIBLE), self._of_all(ids, 0)

    def _of_growing(self, of_all: np.ndarray) -> np.ndarray:
        """Select the rows of requests that still grow: [num_growing, ...] from [batch, ...]."""
        return of_all if len(self._growing) == self._size else of_all[self._growing]

    def _of_all(self, of_growing: np.ndarray, otherwise: np.float32 | int) -> np.ndarray:
        """Expand an array of the requests that still grow, [num_growing, ...], to [batch, ...]. Other requests get the
        value `otherwise`."""
        if len(self._growing) == self._size:
            return of_growing
        of_all = np.full((self._size, *of_growing.shape[1:]), otherwise, dtype=of_growing.dtype)
        of_all[self._growing] = of_growing
        return of_all

    def _goes_on(self, above: np.ndarray, width: int, log_probs: np.ndarray) -> np.ndarray:
        """bool [num_growing]   whether each request grows children below its frontier (the nodes to expand next).

        above: int64 [batch, n], the index of each node's parent among the `width` nodes of the previous frontier.
        log_probs: float32 [batch, n], the draft model's log probability of each node's token.
        """
        best = self._of_growing(self._frontier_scores[:, 0])
        goes: np.ndarray = best >= self._least_score
        if self._levels is None:
            return goes
        going = self._growing[self._goes]
        rows = above[going] + width * np.arange(len(going))[:, None]
        requests = going.repeat(above.shape[1])
        is_first_draw = np.zeros(len(requests), dtype=bool)
        num_nodes = np.zeros(self._size, dtype=np.int64)  # one: the engine drops nodes that do not pay
        num_nodes[self._growing] = goes & (best > IMPOSSIBLE)
        probs = np.exp(log_probs[going].ravel())
        return self._levels.goes_on(requests, rows.ravel(), probs, is_first_draw, num_nodes)[self._growing]

    def build(self) -> Draft:
        levels = zip(*self._grown, strict=True)
        token_ids, parents, scores, log_probs = (np.concatenate(each, axis=1) for each in levels)
        # No child is likelier than its parent, which is before it: so the parent of a kept node is kept.
        kept = _best(scores, max(self._budgets))
        is_within = np.arange(kept.shape[1]) < np.array(self._budgets)[:, None]
        mask = np.zeros(scores.shape, dtype=bool)
        mask[self._each, kept] = is_within & (scores[self._each, kept] > IMPOSSIBLE)
        number = mask.cumsum(axis=1) - 1  # index of each node among those that are kept
        parent_numbers = np.where(parents < 0, -1, number[self._each, parents])
        places = mask.nonzero()
        deepest = int(places[1].max()) if len(places[1]) else -1  # nodes are in the order of levels
        return Draft.from_arrays(
            token_ids[places],
            parent_numbers[places].astype(np.int32),
            mask.sum(axis=1).tolist(),
            bisect_right([0, *accumulate(level[0].shape[1] for level in self._grown)], deepest),
            scores=np.exp(log_probs[places]),
            device=self._device,
        )


def _best(scores: np.ndarray, number: int) -> np.ndarray:
    """Return the indices of the `number` highest scores in each row of [batch, n], highest first. Of equal scores the
    first comes first."""
    return (-scores).argsort(axis=1, kind="stable")[:, :number]
