"""Combines drafts of several proposers for the same requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, evolve, field

from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.drafting.merging import merge_drafts


def combine_drafts(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> Draft:
    """Combine the drafts of several proposers into one tree for each request.

    If no draft has sampled tokens, `merge_drafts` merges them all. Otherwise the first draft that has sampled tokens is
    kept whole, since dropping a sampled token would change the output's distribution (docs/losslessness.md). The best
    tokens of the other drafts are then added to its trees, until a request has max_draft_tokens.

    Added tokens come after existing siblings and count as chosen (picked deterministically), even if they were sampled:
    verification of chosen tokens is lossless for any token. If an added token equals an existing child of the same
    parent, the two become one node with the children of both. This is lossless because these children depend only on
    earlier draws.

    Raises ConfigError if drafts that are merged differ in batch size or device.
    """
    sampled = next((i for i, draft in enumerate(drafts) if draft.q is not None), None)
    if sampled is None:
        return merge_drafts(drafts, max_draft_tokens)
    whole = drafts[sampled]
    others = [*drafts[:sampled], *drafts[sampled + 1 :]]
    chosen = [evolve(draft, q=None, q_rows=None, q_to_target=None, q_ids=None) for draft in others]
    merged = merge_drafts(chosen, max_draft_tokens)
    trees = [_Tree.of(whole.tree(b)) for b in range(whole.batch_size)]
    for b, (tree, most) in enumerate(zip(trees, max_draft_tokens, strict=True)):
        tree.hang_on(merged.tree(b), most)
    return _united(whole, trees)


@define
class _Tree:
    """A draft tree under construction. Its first `num_whole` nodes are all nodes of the draft that is kept whole."""

    token_ids: list[int]
    parents: list[int]
    num_whole: int
    children: dict[tuple[int, int], int] = field(factory=dict)  # (parent, token) -> node, the first of equal ones

    @classmethod
    def of(cls, given: DraftTree) -> _Tree:
        tree = cls(list(given.token_ids), list(given.parents), len(given.token_ids))
        for node, (parent, token) in enumerate(zip(given.parents, given.token_ids, strict=True)):
            tree.children.setdefault((parent, token), node)  # never looked up below a dead node
        return tree

    def hang_on(self, other: DraftTree, most: int) -> None:
        """Merge the nodes of `other` into this tree, parents first. A node that this tree already has is not added
        again. most: the number of nodes at which this tree is full."""
        places: dict[int, int] = {-1: -1}  # of the other's nodes, here
        for node, (parent, token) in enumerate(zip(other.parents, other.token_ids, strict=True)):
            if parent not in places:
                continue
            key = places[parent], token
            if key not in self.children:
                if len(self.token_ids) >= most:
                    continue
                self.children[key] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(key[0])
            places[node] = self.children[key]


def _united(whole: Draft, trees: Sequence[_Tree]) -> Draft:
    """Make one draft from the trees of all requests, with the draft distributions `q` of `whole`."""
    assert whole.q_rows is not None
    if sum(len(tree.token_ids) for tree in trees) == whole.num_nodes:
        return whole
    device, given = whole.token_ids.device, whole.on_host(whole.q_rows).tolist()
    q_rows: list[int] = []
    for tree, first in zip(trees, whole.offsets, strict=False):
        q_rows += given[first : first + tree.num_whole] + [-1] * (len(tree.token_ids) - tree.num_whole)
    combined = Draft.from_trees([DraftTree(tree.token_ids, tree.parents) for tree in trees])
    return evolve(
        evolve(combined, q_rows=torch.tensor(q_rows, dtype=torch.int32)).to(device),
        q=whole.q,
        q_to_target=whole.q_to_target,
        q_ids=whole.q_ids,
        with_replacement=whole.with_replacement,
    )
