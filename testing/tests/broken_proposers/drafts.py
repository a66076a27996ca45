"""Faulty proposers that return wrong drafts, mostly with wrong tensors."""

from __future__ import annotations

import attrs
from good_proposers import Branching, Sampling, Selecting

from broken_proposers.case import Recent, breaks
from specdec_core import Draft
from specdec_core.contracts.draft import DEAD, HostCopy


@breaks("test_drafts_something")
class Silent(Recent):
    def chain(self, request, most):
        return []


@breaks("test_tensors")
class Wide(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, parents=draft.parents.long())


@breaks("test_tensors", is_variant=True)
class Missing(Recent):
    def propose(self, batch):
        return Draft.from_chains([self.chain(batch.requests[0], batch.max_draft_tokens[0])])


@breaks("test_budgets")
class Greedy(Recent):
    def chain(self, request, most):
        return super().chain(request, most + 1)


@breaks("test_budgets", is_variant=True)
class Levelling(Recent):
    """Uses the largest max_draft_tokens of the batch for every request."""

    def propose(self, batch):
        budgets = [max(batch.max_draft_tokens)] * len(batch.requests)
        return super().propose(attrs.evolve(batch, max_draft_tokens=budgets))


@breaks("test_vocabulary")
class Outlandish(Recent):
    def chain(self, request, most):
        chain = super().chain(request, most)
        return [*chain[:-1], self.context.target.vocab_size] if chain else []


@breaks("test_parents_come_first")
class Backward(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        parents = draft.parents.clone()
        parents[:1] = draft.num_nodes - 1
        return attrs.evolve(draft, parents=parents)


@breaks("test_max_depth")
class Shallow(Branching):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, max_depth=min(draft.max_depth, 1))


@breaks("test_is_chain")
class Straight(Branching):
    def propose(self, batch):
        return attrs.evolve(super().propose(batch), is_chain=True)


@breaks("test_is_chain", is_variant=True)
class Interrupted(Recent):
    """Returns drafts with is_chain=True whose second node is padding and whose third node is a child of the root."""

    def propose(self, batch):
        draft = super().propose(batch)
        parents = draft.parents.clone()
        for start, n in zip(draft.offsets, draft.num_nodes_per_request, strict=False):
            if n > 2:
                parents[start + 1], parents[start + 2] = DEAD, -1
        return attrs.evolve(draft, parents=parents)


@breaks("test_host_copies")
class Stale(Recent):
    """Returns a host copy of token_ids that differs from the tensor."""

    def propose(self, batch):
        draft = super().propose(batch)
        old = (draft.token_ids.numpy() + 1) % self.context.target.vocab_size
        return attrs.evolve(draft, host_copies=(HostCopy(draft.token_ids, old),))


@breaks("test_scores")
class Scored(Branching):
    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        return attrs.evolve(draft, scores=torch.full((draft.num_nodes,), -0.7))


@breaks("test_sampled_siblings_come_first")
class Unordered(Sampling):
    """Marks the root's first child as picked deterministically, although its second child was sampled."""

    def propose(self, batch):
        draft = super().propose(batch)
        rows = draft.q_rows.clone()
        for start, end in zip(draft.offsets, draft.offsets[1:], strict=False):
            if end - start == 2:
                rows[start] = -1
        return attrs.evolve(draft, q_rows=rows)


@breaks("test_q_rows")
class Rowless(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, q_rows=draft.q_rows + (draft.q_rows >= 0).int() * 1000)


@breaks("test_q")
class Logits(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        return attrs.evolve(draft, q=draft.q.log())


@breaks("test_q_to_target")
class Doubled(Sampling):
    def propose(self, batch):
        draft = super().propose(batch)
        mapping = draft.q_to_target.clone()
        mapping[-1] = mapping[0]
        return attrs.evolve(draft, q_to_target=mapping)


@breaks("test_q_ids")
class Repeating(Selecting):
    """Returns a q_ids in which a token id occurs twice in one row. No draft token has this id."""

    def propose(self, batch):
        draft = super().propose(batch)
        ids, drawn = draft.q_ids.clone(), draft.token_ids[(draft.q_rows >= 0).nonzero()].flatten()
        for row in range(len(ids)):
            others = [column for column, token in enumerate(ids[row].tolist()) if token not in drawn.tolist()]
            if len(others) > 1:
                ids[row, others[0]] = ids[row, others[1]]
        return attrs.evolve(draft, q_ids=ids)


@breaks("test_q_ids", is_variant=True)
class Mapped(Selecting):
    """Returns drafts with both q_ids and q_to_target, which exclude each other."""

    def propose(self, batch):
        return attrs.evolve(super().propose(batch), q_to_target=self.to_target[: self.NUM_SELECTED])


@breaks("test_sampled_tokens_are_possible")
class Unmapped(Sampling):
    """Returns a `q` with all probability on the least likely token, so that the sampled tokens have probability 0."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        best = torch.nn.functional.one_hot(draft.q.argmin(-1), self.NUM_TOKENS).float() if len(draft.q) else draft.q
        return attrs.evolve(draft, q=best)


@breaks("test_one_token_contexts")
class Impatient(Recent):
    def chain(self, request, most):
        assert len(request.token_ids) > 2
        return super().chain(request, most)


@breaks("test_long_contexts")
class Brief(Recent):
    def chain(self, request, most):
        assert len(request.token_ids) < 256
        return super().chain(request, most)
