"""Predicted outputs: drafts the tokens of a request's prediction that come next, and where that is uncertain, those of
several places as a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field

from specdec_core import Draft, Proposer, ProposerBatch, RequestView
from specdec_proposer_prediction import PredictionConfig
from specdec_proposer_prediction.alignment import Alignment

LATER_BRANCH = 0.3
"""The estimated probability that the target takes a branch that is not the first."""


@define
class Following:
    """A request's alignment with its prediction, and how many of the request's tokens it has seen."""

    alignment: Alignment
    num_tokens: int


@define
class Tree:
    """A draft in the making. A token that two places have in common is one node."""

    token_ids: list[int] = field(factory=list)
    parents: list[int] = field(factory=list)
    scores: list[float] = field(factory=list)
    _nodes: dict[tuple[int, int], int] = field(factory=dict)  # {(parent, token): node}
    max_depth: int = 0

    def add(self, token_ids: Sequence[int], run: int, *, is_first: bool) -> None:
        """Add a branch from the root. run: how many tokens before it matched (see `Alignment.places`)."""
        parent = -1
        for depth, token_id in enumerate(token_ids):
            node = self._nodes.get((parent, token_id))
            if node is None:
                node = self._nodes[parent, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(parent)
                certainty = (run + depth + 1) / (run + depth + 2)
                self.scores.append(certainty if is_first or depth else LATER_BRANCH)
            parent, self.max_depth = node, max(self.max_depth, depth + 1)


class PredictionProposer(Proposer):
    """Drafts copies of each request's prediction.

    It needs no `reset`: a preempted request keeps its tokens, and drafts depend on nothing else.
    """

    def __init__(self, config: PredictionConfig, device: torch.device) -> None:
        self._max_branches, self._device = config.prediction_max_branches, device
        self._followed: dict[str, Following] = {}

    def propose(self, batch: ProposerBatch) -> Draft:
        trees = [self._tree(*each) for each in zip(batch.requests, batch.max_draft_tokens, strict=True)]
        return Draft.from_arrays(
            np.array([token for tree in trees for token in tree.token_ids], dtype=np.int64),
            np.array([parent for tree in trees for parent in tree.parents], dtype=np.int32),
            [len(tree.token_ids) for tree in trees],
            max((tree.max_depth for tree in trees), default=0),
            scores=np.array([score for tree in trees for score in tree.scores], dtype=np.float32),
            device=self._device,
        )

    def finish(self, request: RequestView, reason: str) -> None:
        self._followed.pop(request.id, None)

    def _tree(self, request: RequestView, most: int) -> Tree:
        followed = self._followed.get(request.id)
        if followed is None:
            followed = Following(Alignment(request.prediction), request.num_prompt_tokens)
            self._followed[request.id] = followed
        new, followed.num_tokens = request.token_ids[followed.num_tokens :], len(request.token_ids)
        followed.alignment.follow(new.tolist())
        tree, left = Tree(), most
        places = followed.alignment.places()[: min(self._max_branches, most)]
        for index, (place, run) in enumerate(places):
            share = left if index == len(places) - 1 else -(-left // 2)
            tree.add(followed.alignment.expected(place, share), run, is_first=index == 0)
            left = most - len(tree.token_ids)
        return tree
