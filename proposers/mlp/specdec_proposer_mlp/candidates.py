"""Draft trees of the most probable paths, as the authors of MLP speculators draft them (fms-extras,
speculator.py: generate_suffixes)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from attrs import evolve

from specdec_core import Draft, DraftTree, Level, ProposerBatch, most_likely_of


class CandidateTree:
    """Grows every path that takes one of the top_k[i] likeliest tokens of head i at depth i, and keeps the likeliest.

    A request's tree is made of its num_candidates likeliest whole paths. Its draft tokens are in the order of these
    paths, and cut to max_draft_tokens, so a request with little room drafts its likeliest path.
    """

    def __init__(self, batch: ProposerBatch, top_k: Sequence[int], num_candidates: int) -> None:
        self._budgets, self._device = batch.max_draft_tokens, batch.root_token_ids.device
        # All heads run, even if no request has room for as many tokens: else its tree would depend on the batch.
        self._top_k, self._num_candidates, self._most_likely = top_k, num_candidates, most_likely_of(batch)
        self._requests = np.arange(len(self._budgets))
        self._token_ids: list[torch.Tensor] = []  # of each level, int64 [batch, width]
        self._probs: list[torch.Tensor] = []  # of these tokens, each after its parent, float32 [batch, width]
        self._num_nodes = 0  # of each request, in the levels so far
        self._ancestors = torch.empty(len(self._budgets), 0, dtype=torch.int64, device=self._device)
        self._scores = torch.zeros(len(self._budgets), 1, device=self._device)  # log probabilities of the paths

    def grow(self, logits: torch.Tensor) -> Level | None:
        batch, depth = len(self._budgets), len(self._token_ids)
        log_probs, token_ids = self._most_likely(logits, self._top_k[depth])
        rows = torch.arange(len(logits), device=self._device).repeat_interleave(token_ids.shape[1])
        scores = self._scores.flatten()[rows] + log_probs.flatten()
        # Where a head's logits are not finite, no path goes on.
        self._scores = scores.nan_to_num(-torch.inf, -torch.inf, -torch.inf).view(batch, -1)
        self._token_ids.append(token_ids.view(batch, -1))
        self._probs.append(log_probs.exp().view(batch, -1))
        if depth + 1 == len(self._top_k):
            return None
        width = self._scores.shape[1]
        numbers = torch.arange(self._num_nodes, self._num_nodes + width, device=self._device).repeat(batch)
        self._ancestors = torch.cat([self._ancestors[rows], numbers.unsqueeze(1)], dim=1)
        starts, self._num_nodes = (self._num_nodes,) * batch, self._num_nodes + width
        is_chain = self._num_nodes == depth + 1
        return Level(width, self._requests, rows, token_ids.flatten(), self._ancestors, starts, is_chain)

    def build(self) -> Draft:
        best = self._scores.topk(min(self._num_candidates, self._scores.shape[1]), dim=1)
        tables = [best.indices, best.values, *self._token_ids, *self._probs]
        packed = torch.cat([table.to(torch.float64) for table in tables], dim=1).cpu()  # one copy to the host
        indices, values, *levels = (part.tolist() for part in packed.split([table.shape[1] for table in tables], 1))
        levels, probs = levels[: len(self._token_ids)], levels[len(self._token_ids) :]
        trees: list[DraftTree] = []
        scores: list[float] = []
        for b, (leaves, totals) in enumerate(zip(indices, values, strict=True)):
            sound = [int(leaf) for leaf, total in zip(leaves, totals, strict=True) if total > -np.inf]
            tree, places = _tree([[*map(int, token_ids[b])] for token_ids in levels], sound, self._budgets[b])
            trees.append(tree)
            scores += [probs[depth][b][place] for depth, place in places]
        return evolve(Draft.from_trees(trees), scores=torch.tensor(scores)).to(self._device)


def _tree(
    levels: Sequence[Sequence[int]], leaves: Sequence[int], budget: int
) -> tuple[DraftTree, Collection[tuple[int, int]]]:
    """Make a tree of the paths to these leaves, of at most `budget` draft tokens. Returns it and the (level, index in
    the level) of each of its nodes.

    levels: the tokens of each level. All tokens of a level have equally many children in the next one, in order.
    leaves: indices in the last level.
    """
    tree = DraftTree([], [])
    numbers: dict[tuple[int, int], int] = {}
    for leaf in leaves:
        parent = -1
        for depth, token_ids in enumerate(levels):
            place = depth, leaf * len(token_ids) // len(levels[-1])
            if place not in numbers:
                if len(numbers) == budget:
                    return tree, numbers.keys()
                numbers[place] = len(numbers)
                tree.token_ids.append(token_ids[place[1]])
                tree.parents.append(parent)
            parent = numbers[place]
    return tree, numbers.keys()
