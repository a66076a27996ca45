"""Faulty proposers: their drafts depend on more than the request's tokens and seed, or their tokens are not sampled
from the distributions that they give as `Draft.q`."""

from __future__ import annotations

from itertools import count

import attrs
from good_proposers import Sampling, Selecting

from broken_proposers.case import Recent, breaks
from specdec_core import Stream

MOODS = count()


@breaks("test_same_tokens_same_draft")
class Moody(Recent):
    """Drafts a token that depends on how many instances of the class were built before."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.mood = next(MOODS) % context.target.vocab_size

    def chain(self, request, most):
        return [self.mood]


@breaks("test_batch_does_not_matter")
class Placed(Recent):
    """Drafts more tokens for the first request of the batch than for the others."""

    def propose(self, batch):
        budgets = [most if i == 0 else 1 for i, most in enumerate(batch.max_draft_tokens)]
        return super().propose(attrs.evolve(batch, max_draft_tokens=budgets))


@breaks("test_sampled_nodes_exist_whatever_they_are")
class Choosy(Sampling):
    """Marks sampled draft tokens as padding (parent -2) if they are unlikely."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        is_unlikely = [
            row >= 0 and draft.q[row, self.from_target[token]] < 0.2
            for row, token in zip(draft.q_rows.tolist(), draft.token_ids.tolist(), strict=True)
        ]
        return attrs.evolve(draft, parents=torch.where(torch.tensor(is_unlikely, dtype=torch.bool), -2, draft.parents))


@breaks("test_sampled_tokens_follow_q")
class Stubborn(Sampling):
    def draw(self, batch, request, node, probs):
        return int(probs.argmax())


@breaks("test_sampled_tokens_follow_q", is_variant=True)
class Ranking(Selecting):
    """Takes the likeliest tokens in order, but declares them as sampled from `Draft.q`."""

    def draw(self, batch, request, node, probs):
        return int(probs.argmax())


@breaks("test_sampled_tokens_follow_q", is_variant=True)
class Completing(Selecting):
    """Samples the root's first child, but takes the likeliest remaining token as the second child and declares it as
    sampled."""

    def draw(self, batch, request, node, probs):
        return int(probs.argmax()) if node == 1 else super().draw(batch, request, node, probs)


@breaks("test_sampled_tokens_follow_q", is_variant=True)
class Heated(Sampling):
    """Gives in `Draft.q` the distribution before temperature, although it samples after temperature."""

    def propose(self, batch):
        import torch

        draft = super().propose(batch)
        powers = draft.q ** batch.temperature.max().clamp(min=0.1)
        return attrs.evolve(draft, q=powers / powers.sum(-1, keepdim=True) if len(powers) else torch.empty_like(powers))


@breaks("test_sampled_tokens_are_drawn_with_own_noise")
class Coupled(Sampling):
    """Draws the root's first child with the noise of the target's own token, and declares it as sampled."""

    def draw(self, batch, request, node, probs):
        import torch

        if node != 0:
            return super().draw(batch, request, node, probs)
        return int(batch.random.target_token(probs[None], torch.tensor([request]), torch.tensor([0])))


@breaks("test_sampled_tokens_are_drawn_with_own_noise", is_variant=True)
class Intruding(Sampling):
    """Draws from the stream in which the verifier accepts and rejects."""

    def draw(self, batch, request, node, probs):
        import torch

        return int(batch.random.categorical(probs[None], Stream.ACCEPT, torch.tensor([request]), torch.tensor([node])))


@breaks("test_sampled_tokens_are_drawn_with_own_noise", is_variant=True)
class Borrowing(Sampling):
    """Draws from the target's stream."""

    def draw(self, batch, request, node, probs):
        import torch

        return int(batch.random.categorical(probs[None], Stream.TARGET, torch.tensor([request]), torch.tensor([node])))
