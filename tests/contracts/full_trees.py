"""A test proposer that always drafts as many tokens as it may, and records how many these were."""

from __future__ import annotations

from collections import Counter

from attrs import frozen

from specdec_core import BuildContext, Draft, DraftTree, Plan, Proposer, ProposerBatch, ProposerSpec


@frozen
class NoOptions:
    """The config class of a method without options."""


class FullTrees(Proposer):
    """Drafts binary trees of max_draft_tokens nodes. Some of their tokens are right by chance."""

    def __init__(self, context: BuildContext) -> None:
        self.vocab_size = context.target.vocab_size
        self.num_drafted: Counter[str] = Counter()  # request id -> tokens
        self.budgets: list[dict[str, int]] = []  # of each call: request id -> max_draft_tokens

    def propose(self, batch: ProposerBatch) -> Draft:
        ids = [request.id for request in batch.requests]
        self.budgets.append(dict(zip(ids, batch.max_draft_tokens, strict=True)))
        self.num_drafted.update(self.budgets[-1])
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_trees([self.tree(int(request.token_ids[-1]), most) for request, most in pairs])

    def tree(self, root: int, num_nodes: int) -> DraftTree:
        tokens = [(7 * root + 5 * i) % self.vocab_size for i in range(num_nodes)]
        return DraftTree(tokens, [(i - 1) // 2 if i else -1 for i in range(num_nodes)])


FULL_TREES = ProposerSpec(
    name="full_trees",
    config=NoOptions,
    build=lambda config, context: FullTrees(context),
    api=1,
    plan=lambda config, target, num_speculative_tokens: Plan(observes=False),
)
