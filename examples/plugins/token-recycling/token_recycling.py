"""Token Recycling (Luo et al. 2024, https://arxiv.org/abs/2408.08696): drafts trees of the tokens that the target found
likely after each token when it last computed it."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from attrs import frozen

from specdec_core import DEAD, Draft, Plan, Proposer, ProposerSpec, flag, hookimpl, option, whole_number

MOST_ROWS = 256
"""Prompt tokens for which logits are computed together: each takes as many floats as the vocabulary has tokens."""

NOTHING = -1
"""Stands for a token that is not known yet."""


@frozen
class TokenRecyclingConfig:
    """The method's keys of speculative_config."""

    token_recycling_top_k: int = option(
        whole_number(1, 64), "How many of the target's likeliest next tokens to keep for each token.", default=8
    )
    token_recycling_prompts: bool = option(
        flag, "Store them for the tokens of prompts, too, for which the LM head is computed once more.", default=True
    )


def static_tree(num_nodes, top_k):
    """Return the shape of the draft tree: the num_nodes paths that are likeliest to be accepted, the likeliest first.

    A path has one rank per level: (1, 0) is the likeliest token after the root's second-likeliest one. A token of rank
    r is taken to be accepted with probability 0.5 / (r + 1) ** 1.4.
    """
    heap, paths = [(-0.5, (0,))], []
    while len(paths) < num_nodes:
        chance, (*above, rank) = heappop(heap)
        paths.append((*above, rank))
        heappush(heap, (chance * 0.5, (*above, rank, 0)))
        if rank + 1 < top_k:
            heappush(heap, (chance * ((rank + 1) / (rank + 2)) ** 1.4, (*above, rank + 1)))
    return paths


class TokenRecycling(Proposer):
    """All requests share one matrix, as in the paper: what one request shows is used for all of them."""

    def __init__(self, config, context):
        paths = [(), *static_tree(context.num_speculative_tokens, config.token_recycling_top_k)]
        self.device, self.num_places, self.output_head = context.device, len(paths), context.output_head
        # int64 [vocab + 1, top_k]: for each token, those that were likeliest after it. The last row is NOTHING's own.
        self.likely_after = np.full((context.target.vocab_size + 1, config.token_recycling_top_k), NOTHING)
        self.parents = np.array([paths.index(path[:-1]) for path in paths])  # of each place of the tree; 0: the root
        self.ranks = np.array([0, *(path[-1] for path in paths[1:])])
        depths = np.array([len(path) for path in paths])
        self.levels = [np.flatnonzero(depths == depth) for depth in range(1, depths.max() + 1)]

    def observe(self, observation):
        if "final" in observation.features:
            self.read_prompts(observation)
        top = observation.top_tokens
        if top is not None:  # None: drafting was turned off for these requests
            is_live = top.parents != DEAD
            # Of a token that occurs several times, the last occurrence counts.
            self.likely_after[top.token_ids[is_live].cpu().numpy()] = top.ids[is_live].cpu().numpy()

    def read_prompts(self, observation):
        from specdec_core import upload  # it imports torch

        rows = []  # of prompt tokens, but for the last one of a prompt, which has top tokens
        columns = (observation.requests, observation.starts, observation.offsets, observation.host_num_valid)
        for request, start, first, num_valid in zip(*columns, strict=False):
            rows += range(first, first + min(num_valid, request.num_prompt_tokens - 1 - start))
        for begin in range(0, len(rows), MOST_ROWS):
            some = upload(np.array(rows[begin : begin + MOST_ROWS]), self.device)
            logits = self.output_head(observation.features["final"][some])
            likely = logits.topk(self.likely_after.shape[1]).indices
            self.likely_after[observation.token_ids[some].cpu().numpy()] = likely.cpu().numpy()

    def propose(self, batch):
        token_ids = np.full((len(batch.requests), self.num_places), NOTHING)
        token_ids[:, 0] = [request.token_ids[-1] for request in batch.requests]
        for level in self.levels:
            token_ids[:, level] = self.likely_after[token_ids[:, self.parents[level]], self.ranks[level]]
        is_node = token_ids != NOTHING
        is_node[:, 0] = False
        numbers = is_node.cumsum(axis=1)  # of the nodes, from 1; the root has number 0
        is_node &= numbers <= np.array(batch.max_draft_tokens)[:, None]
        parents = (numbers[:, self.parents] - 1).astype(np.int32)
        depth = min(len(self.levels), max(batch.max_draft_tokens, default=0))
        counts = is_node.sum(axis=1).tolist()
        return Draft.from_arrays(token_ids[is_node], parents[is_node], counts, depth, device=self.device)

    def forget(self):
        self.likely_after[:] = NOTHING


def plan(config, target, num_speculative_tokens):
    taps = ("final",) if config.token_recycling_prompts else ()
    return Plan(taps=taps, top_tokens=config.token_recycling_top_k)


@hookimpl
def specdec_proposers():
    return [
        ProposerSpec(
            name="token_recycling",
            config=TokenRecyclingConfig,
            build=TokenRecycling,
            plan=plan,
            num_speculative_tokens=lambda config, device: 12 if device.type == "cpu" else 80,
            api=1,
        )
    ]
