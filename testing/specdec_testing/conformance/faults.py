"""The rules that a draft (`specdec_core.Draft`) must keep. Each rule is a function that yields an error message with
advice for each violation.

A rule yields nothing if it cannot be checked because the draft breaks another rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from specdec_core.config.fields import shown
from specdec_core.contracts.draft import DEAD, Draft

if TYPE_CHECKING:
    from specdec_testing.conformance.recording import Proposal

Rule = Callable[["Proposal"], Iterator[str]]


@frozen
class Node:
    """A draft token in one request's tree.

    index: its index in the tree.
    parent: the index of its parent in the tree; -1: the parent is the root (the request's last token); -2: the node is
        padding.
    q_row: the row of Draft.q that the token was sampled from; -1: it was picked deterministically.
    """

    index: int
    token_id: int
    parent: int
    q_row: int  # -1: chosen


def trees(proposal: Proposal) -> list[list[Node]]:
    """Return the nodes of a recorded draft, one list per request. The draft's tensors must be valid."""
    draft = proposal.draft
    rows = draft.q_rows.tolist() if draft.q_rows is not None else [-1] * draft.num_nodes
    tokens, parents = draft.token_ids.tolist(), draft.parents.tolist()
    return [
        [Node(i - start, tokens[i], parents[i], rows[i]) for i in range(start, end)]
        for start, end in pairwise(draft.offsets)
    ]


def tensors(proposal: Proposal) -> Iterator[str]:
    draft = proposal.draft
    if not isinstance(draft, Draft):
        yield f"propose returned {shown(draft)}: return a Draft, such as Draft.from_chains(...)"
        return
    ends = list(draft.offsets)
    if ends[:1] != [0] or len(ends) != len(proposal.asked) + 1 or any(b < a for a, b in pairwise(ends)):
        yield f"offsets are {ends}: give 0 and then the end of each of the {len(proposal.asked)} requests' trees"
        return
    n = draft.num_nodes
    q_shape = tuple(draft.q.shape) if draft.q is not None and draft.q.dim() == 2 else (-1, -1)
    for name, tensor, dtype, shape in (
        ("token_ids", draft.token_ids, torch.int64, (n,)),
        ("parents", draft.parents, torch.int32, (n,)),
        ("q", draft.q, torch.float32, q_shape),
        ("q_rows", draft.q_rows, torch.int32, (n,)),
        ("q_to_target", draft.q_to_target, torch.int64, q_shape[1:]),
        ("q_ids", draft.q_ids, torch.int64, q_shape),
        ("scores", draft.scores, torch.float32, (n,)),
    ):
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            yield f"{name} is {tensor.dtype} {list(tensor.shape)}: make it {dtype} {list(shape)}"
        elif tensor is not None and tensor.device.type != proposal.device.type:  # cuda is cuda:0
            yield f"{name} is on {tensor.device}: put it on the engine's device, {proposal.device} (context.device)"
    if (draft.q is None) != (draft.q_rows is None):
        yield "of q and q_rows one is None: give both for sampled nodes, and neither where all nodes are chosen"


def is_readable(proposal: Proposal) -> bool:
    return not any(tensors(proposal))


def budgets(proposal: Proposal) -> Iterator[str]:
    if is_readable(proposal):
        for asked, num_nodes in zip(proposal.asked, proposal.draft.num_nodes_per_request, strict=True):
            if num_nodes > asked.max_draft_tokens:
                yield (
                    f"{num_nodes} nodes for a request with max_draft_tokens {asked.max_draft_tokens}: obey "
                    f"batch.max_draft_tokens[i] for each request i; in a tree every node counts"
                )


def vocabulary(proposal: Proposal) -> Iterator[str]:
    if is_readable(proposal):
        outside = {node.token_id for tree in trees(proposal) for node in tree} - set(range(proposal.vocab_size))
        if outside:
            yield (
                f"token ids {sorted(outside)[:5]}: draft ids of the target's vocabulary, 0 to "
                f"{proposal.vocab_size - 1} (context.target.vocab_size)"
            )


def parents(proposal: Proposal) -> Iterator[str]:
    if is_readable(proposal):
        for node in (node for tree in trees(proposal) for node in tree):
            if not DEAD <= node.parent < node.index:
                yield (
                    f"node {node.index} has the parent {node.parent}: give the index, within the request's own tree, "
                    f"of a node before it, -1 for the root or -2 for a dead node"
                )


def can_be_walked(proposal: Proposal) -> bool:
    return is_readable(proposal) and not any(parents(proposal))


def depths(tree: list[Node]) -> list[int]:
    """Return the depth of each node of a request's tree, 1 for children of the root. Padding nodes (parent -2) and all
    nodes below them have depth 0."""
    found: list[int] = []
    for node in tree:
        above = 0 if node.parent == -1 else None if node.parent == DEAD else found[node.parent] or None
        found.append(0 if above is None else above + 1)
    return found


def is_live(proposal: Proposal) -> torch.Tensor:
    """Return for each node of a draft whether it is live, that is neither padding (parent -2) nor below a padding node.
    bool [num_nodes]."""
    return torch.tensor([depth > 0 for tree in trees(proposal) for depth in depths(tree)], dtype=torch.bool)


def max_depth(proposal: Proposal) -> Iterator[str]:
    if can_be_walked(proposal):
        deepest = max((depth for tree in trees(proposal) for depth in depths(tree)), default=0)
        most = max((asked.max_draft_tokens for asked in proposal.asked), default=0)
        if not deepest <= proposal.draft.max_depth <= max(most, deepest):
            yield (
                f"max_depth is {proposal.draft.max_depth} and the deepest node is at {deepest}: give that depth, or a "
                f"bound on it which no budget exceeds (the largest is {most})"
            )


def live(tree: list[Node]) -> list[Node]:
    return [node for node, depth in zip(tree, depths(tree), strict=True) if depth]


def has_draft(proposal: Proposal) -> bool:
    if not can_be_walked(proposal):
        return proposal.draft.num_nodes > 0
    return any(map(live, trees(proposal)))


def chain(proposal: Proposal) -> Iterator[str]:
    if can_be_walked(proposal) and proposal.draft.is_chain and not all(map(is_a_chain, trees(proposal))):
        yield (
            "is_chain is True, but the parent of some live node is not the node before it: put dead nodes last in a "
            "chain, and leave is_chain False for trees"
        )


def is_a_chain(tree: list[Node]) -> bool:
    return all(node.parent == node.index - 1 for node in live(tree))


def host_copies(proposal: Proposal) -> Iterator[str]:
    """Yield an error message for each CPU copy in `Draft.host_copies` that differs from the tensor it was copied from.
    The engine reads these copies only if the draft's tensors are on another device."""
    if is_readable(proposal):
        for copy in proposal.draft.host_copies:
            if copy.values.dtype != copy.of.cpu().numpy().dtype or not np.array_equal(copy.values, copy.of.cpu()):
                yield (
                    f"a host copy of {copy.of.tolist()[:5]} holds {copy.values.tolist()[:5]}: leave host_copies to "
                    f"Draft.from_* and Draft.to, and write to no tensor of a draft afterwards"
                )


def scores(proposal: Proposal) -> Iterator[str]:
    if can_be_walked(proposal) and proposal.draft.scores is not None:
        values = proposal.draft.scores.cpu()[is_live(proposal)]
        if not ((values >= 0) & (values <= 1)).all():  # NaN as well
            yield "scores outside 0 to 1: give the estimated chance that a node is accepted if its parent is, or None"


def sampled_first(proposal: Proposal) -> Iterator[str]:
    if can_be_walked(proposal):
        for tree in map(live, trees(proposal)):
            has_chosen = {node.parent: False for node in tree}
            for node in tree:
                if node.q_row < 0:
                    has_chosen[node.parent] = True
                elif has_chosen[node.parent]:
                    yield (
                        f"node {node.index} was sampled and stands after a sibling that was chosen: put the sampled "
                        f"children of a node first, in the order they were drawn"
                    )


def q_rows(proposal: Proposal) -> Iterator[str]:
    if not can_be_walked(proposal) or proposal.draft.q is None:
        return
    num_rows = len(proposal.draft.q)
    for tree in trees(proposal):
        row_of: dict[int, int] = {}
        for node in tree:
            if not -1 <= node.q_row < num_rows:
                yield f"q_rows has {node.q_row} where q has {num_rows} rows: give a row of q, or -1 for a chosen node"
        for node in live(tree):
            if node.q_row >= 0 and row_of.setdefault(node.parent, node.q_row) != node.q_row:
                yield (
                    f"node {node.index} was sampled from row {node.q_row}, its sibling from {row_of[node.parent]}: "
                    f"sampled siblings share the one row of q that they were drawn from"
                )


def used_rows(proposal: Proposal) -> list[int]:
    """Return the indices of the rows of Draft.q that draft tokens were sampled from. Padding does not count."""
    num_rows = len(proposal.draft.q) if proposal.draft.q is not None else 0
    return sorted({node.q_row for tree in trees(proposal) for node in live(tree) if 0 <= node.q_row < num_rows})


def q(proposal: Proposal) -> Iterator[str]:
    if can_be_walked(proposal) and proposal.draft.q is not None:
        rows = proposal.draft.q[used_rows(proposal)].double()
        if not (rows.isfinite().all() and (rows >= 0).all()):
            yield "q has entries that are negative or not finite: give probabilities"
        elif len(rows) and (rows.sum(-1) - 1).abs().max() > 1e-3:
            yield f"rows of q sum to {rows.sum(-1).tolist()[:5]}: give probabilities, which sum to 1, and not logits"


def q_to_target(proposal: Proposal) -> Iterator[str]:
    if not is_readable(proposal) or proposal.draft.q is None:
        return
    mapping, width = proposal.draft.q_to_target, proposal.draft.q.shape[-1]
    if mapping is None:
        if proposal.draft.q_ids is None and width != proposal.vocab_size:
            yield f"q has {width} columns and the target {proposal.vocab_size} token ids: give q_to_target"
    elif mapping.numel() and not 0 <= int(mapping.min()) <= int(mapping.max()) < proposal.vocab_size:
        yield f"q_to_target names token ids outside 0 to {proposal.vocab_size - 1}"
    elif len(set(mapping.tolist())) != len(mapping):
        yield "q_to_target names a token id twice: give each draft token a target token of its own"


def q_ids(proposal: Proposal) -> Iterator[str]:
    if not can_be_walked(proposal) or proposal.draft.q is None or proposal.draft.q_ids is None:
        return
    ids = proposal.draft.q_ids
    if proposal.draft.q_to_target is not None:
        yield "both q_ids and q_to_target are given: say in one of them which tokens the columns of q stand for"
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < proposal.vocab_size:
        yield f"q_ids names token ids outside 0 to {proposal.vocab_size - 1}"
    elif any(len({*row}) < len(row) for row in ids[used_rows(proposal)].tolist()):
        yield "q_ids names a token id twice in a row: give each entry of a row another token"


def sampled_tokens(proposal: Proposal) -> Iterator[str]:
    if not can_be_walked(proposal) or proposal.draft.q is None:
        return
    if any(fault for rule in (q_rows, q, q_to_target, q_ids, vocabulary) for fault in rule(proposal)):
        return
    for tree in trees(proposal):
        drawn: set[tuple[int, int]] = set()
        for node in (node for node in live(tree) if node.q_row >= 0):
            if target_probs(proposal, node.q_row)[node.token_id] <= 0:
                yield (
                    f"node {node.index} is token {node.token_id}, which its row of q gives no probability: give the "
                    f"distribution that it was drawn from (and token_ids of the target, q_to_target applied)"
                )
            if not proposal.draft.with_replacement and (node.parent, node.token_id) in drawn:
                yield f"token {node.token_id} twice among siblings: they were drawn with_replacement, or one is wrong"
            drawn.add((node.parent, node.token_id))


def target_probs(proposal: Proposal, row: int) -> torch.Tensor:
    """Return row `row` of Draft.q as probabilities of all target token ids, float64 [vocab]."""
    draft = proposal.draft
    assert draft.q is not None
    probs = draft.q[row].double()
    ids = draft.q_to_target if draft.q_ids is None else draft.q_ids[row]
    if ids is None:
        return probs
    return torch.zeros(proposal.vocab_size, dtype=torch.float64).index_copy(0, ids.cpu(), probs.cpu())


RULES: tuple[Rule, ...] = (
    tensors, budgets, vocabulary, parents, max_depth, chain, host_copies, scores, sampled_first, q_rows, q, q_to_target,
    q_ids, sampled_tokens,
)  # fmt: skip


def faults_of(proposal: Proposal) -> Iterator[str]:
    for rule in RULES:
        yield from rule(proposal)
