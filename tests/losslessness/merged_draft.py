"""A test proposer that merges two drafts into one tree: a random tree (random_tree.py), and a chain copied from the
request's earlier tokens."""

from __future__ import annotations

import attrs
import torch
from random_tree import RandomTree, RandomTreeConfig, plan

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.proposer import ProposerBatch, ProposerSpec, RequestView
from specdec_core.drafting.merging import merge_drafts

NUM_MERGED = [0, 0]
"""[draft tokens before merging, draft tokens left by it]."""
CHAIN_LEN, CHAIN_SCORE = 6, 0.7


class MergedDraft(RandomTree):
    def propose(self, batch: ProposerBatch) -> Draft:
        tree = super().propose(batch)
        scores = torch.rand(tree.num_nodes, generator=torch.Generator().manual_seed(tree.num_nodes))
        chain = Draft.from_chains([looked_up(request) for request in batch.requests], self.device)
        drafts = [
            attrs.evolve(tree, scores=scores),
            attrs.evolve(chain, scores=torch.full((chain.num_nodes,), CHAIN_SCORE)),
        ]
        merged = merge_drafts(drafts, batch.max_draft_tokens)
        NUM_MERGED[0] += sum(draft.num_nodes for draft in drafts)
        NUM_MERGED[1] += merged.num_nodes
        return merged


def looked_up(request: RequestView) -> list[int]:
    """Return the tokens that followed the previous occurrence of the request's last token, or an empty list if it has
    not occurred before."""
    *before, root = request.token_ids.tolist()
    last = max((i for i, token in enumerate(before) if token == root), default=len(before))
    return before[last + 1 :][:CHAIN_LEN]


MERGED_DRAFT = ProposerSpec(name="merged", config=RandomTreeConfig, build=MergedDraft, api=1, plan=plan)
