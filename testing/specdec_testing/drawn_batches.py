"""Batches of drafts: joins them, draws random ones, and computes the exact joint output distribution of two requests
over all random draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from attrs import evolve, frozen

from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.verifier import RandomSource, Stream, Verifier
from specdec_core.sampling.random import CounterRandom
from specdec_testing.drawn_trees import SAMPLED, History, Model, Shape, draw, sequence_probability, target_logits
from specdec_testing.enumerating import enumerate_outcomes


def joined(drafts: Sequence[Draft]) -> Draft:
    """Join drafts of one request each into one batch. Every draft must have `q`, the draft probabilities, and none
    `q_ids`."""
    q, q_rows, num_rows = [], [], 0
    for draft in drafts:
        assert draft.q is not None
        assert draft.q_rows is not None
        q.append(draft.q)
        q_rows.append(draft.q_rows + num_rows * (draft.q_rows >= 0))
        num_rows += len(draft.q)
    return evolve(
        drafts[0],
        token_ids=torch.cat([draft.token_ids for draft in drafts]),
        parents=torch.cat([draft.parents for draft in drafts]),
        offsets=tuple(np.cumsum([0, *(draft.num_nodes for draft in drafts)]).tolist()),
        max_depth=max(draft.max_depth for draft in drafts),
        q=torch.cat(q),
        q_rows=torch.cat(q_rows).int(),
        is_chain=all(draft.is_chain for draft in drafts),
    )


def random_batch(shapes: Sequence[Shape], vocab: int, seed: int) -> tuple[torch.Tensor, Draft]:
    """Return random target logits (float32 [num_rows, vocab]) and one draft per shape, sampled from draft probabilities
    `q` close to the target's."""
    generator = torch.Generator().manual_seed(seed)
    drafts, rows = [], []
    for shape in shapes:
        logits = 2 * torch.randn(len(shape.parents) + 1, vocab, generator=generator)
        pairs = list(zip(shape.parents, shape.tokens, strict=True))
        sampled = sorted({parent for parent, kind in pairs if kind is SAMPLED})
        q = (
            logits[[parent + 1 for parent in sampled]] + torch.randn(len(sampled), vocab, generator=generator)
        ).softmax(-1)
        q_rows = [sampled.index(parent) if kind is SAMPLED else -1 for parent, kind in pairs]
        tokens = [
            int(q[row].multinomial(1, generator=generator)) if kind is SAMPLED else int(kind or 0)
            for row, (_, kind) in zip(q_rows, pairs, strict=True)
        ]
        draft = Draft.from_trees([DraftTree(tokens, list(shape.parents))])
        drafts.append(evolve(draft, q=q, q_rows=torch.tensor(q_rows, dtype=torch.int32), is_chain=shape.is_chain))
        rows.append(logits)
    return torch.cat(rows), joined(drafts)


def part(logits: torch.Tensor, draft: Draft, request: int) -> tuple[torch.Tensor, Draft]:
    """Return one request of a batch alone: its rows of logits and its draft."""
    start, end = draft.offsets[request : request + 2]
    q_rows = None if draft.q_rows is None else draft.q_rows[start:end]
    alone = evolve(
        draft,
        token_ids=draft.token_ids[start:end],
        parents=draft.parents[start:end],
        offsets=(0, end - start),
        q_rows=q_rows,
    )
    return logits[start + request : end + request + 1], alone


def noise(first: int, batch: int) -> CounterRandom:
    """Return the engine's random source for `batch` requests. first: the first one's index in a larger batch, in which
    it gets the same draws."""
    return CounterRandom([7 * (first + i) for i in range(batch)], torch.arange(first, first + batch) + 30)


@frozen
class NoiseOf:
    """A random source to draft for one request alone, with the same random draws as in the batch.

    random: the batch's random source. request: index of the request in the batch.
    """

    random: RandomSource
    request: int

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        return self.random.target_token(weights, requests + self.request, depths)

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self.random.categorical(weights, stream, requests + self.request, nodes)

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self.random.bernoulli(prob, stream, requests + self.request, nodes)


def joint_error(verifier: Verifier, models: Sequence[tuple[Model, Model]], shapes: Sequence[Shape]) -> float:
    """Return the largest error in the joint probability of two requests' output sequences.

    models: (target, draft model) of each request. shapes: the shape of each request's draft tree.

    All random draws are enumerated. The correct joint probability is the product of each sequence's probability under
    its target. A sequence has depth + 1 tokens. If the verifier emits fewer, the rest is sampled from the target.
    """
    emitted: dict[tuple[History, ...], float] = {}

    def step(random: RandomSource) -> tuple[History, ...]:
        drafts = [draw(shape, models[b][1], NoiseOf(random, b)) for b, shape in enumerate(shapes)]
        logits = torch.cat([target_logits(models[b][0], draft) for b, draft in enumerate(drafts)])
        verdict = verifier.verify(logits, joined(drafts), random)
        pairs = zip(verdict.token_ids.tolist(), verdict.num_accepted.tolist(), strict=True)
        return tuple(tuple(tokens[: accepted + 1]) for tokens, accepted in pairs)

    for probability, tokens in enumerate_outcomes(step):
        emitted[tokens] = emitted.get(tokens, 0.0) + probability
    assert abs(sum(emitted.values()) - 1) < 1e-12
    targets, vocab = [target for target, _ in models], len(models[0][1][()])
    each = [list(product(range(vocab), repeat=shape.depth + 1)) for shape in shapes]
    error = 0.0
    for sequences in product(*each):
        pairs = list(zip(targets, sequences, strict=True))
        expected = np.prod([sequence_probability(target, sequence, 0) for target, sequence in pairs])
        actual = sum(
            p * np.prod([sequence_probability(*pair, len(said)) for pair, said in zip(pairs, tokens, strict=True)])
            for tokens, p in emitted.items()
            if all(s[: len(said)] == said for s, said in zip(sequences, tokens, strict=True))
        )
        error = max(error, float(abs(actual - expected)))
    return error
