"""Joins drafts into batches, and computes the exact joint output distribution of two requests over all random draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from drawn_trees import History, Model, Shape, draw, sequence_probability, target_logits
from enumerating import enumerate_outcomes

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict


def joined(drafts: list[Draft]) -> Draft:
    """Join drafts of one request each into one batch. Every draft must have `q`, the draft probabilities."""
    first_rows = np.cumsum([0, *(len(draft.q) for draft in drafts)]).tolist()
    return evolve(
        drafts[0],
        token_ids=torch.cat([draft.token_ids for draft in drafts]),
        parents=torch.cat([draft.parents for draft in drafts]),
        offsets=tuple(np.cumsum([0, *(draft.num_nodes for draft in drafts)]).tolist()),
        max_depth=max(draft.max_depth for draft in drafts),
        q=torch.cat([draft.q for draft in drafts]),
        q_rows=torch.cat(
            [d.q_rows + first * (d.q_rows >= 0) for d, first in zip(drafts, first_rows, strict=False)]
        ).int(),
        is_chain=all(draft.is_chain for draft in drafts),
    )


@frozen
class NoiseOf:
    """A random source to draft for one request alone, with the same random draws as in the batch.

    random: the batch's random source. request: index of the request in the batch.
    """

    random: RandomSource
    request: int

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        return self.random.categorical(weights, stream, requests + self.request, nodes)


def joint_error(verifier: Any, models: Sequence[tuple[Model, Model]], shapes: Sequence[Shape]) -> float:
    """Return the largest error in the joint probability of two requests' output sequences.

    models: (target, draft model) of each request. shapes: the shape of each request's draft tree.

    All random draws are enumerated. The correct joint probability is the product of each sequence's probability under
    its target. A sequence has depth + 1 tokens. If the verifier emits fewer, the rest is sampled from the target.
    """
    emitted: dict[tuple[History, ...], float] = {}

    def step(random: RandomSource) -> tuple[History, ...]:
        drafts = [draw(shape, models[b][1], NoiseOf(random, b)) for b, shape in enumerate(shapes)]
        logits = torch.cat([target_logits(models[b][0], draft) for b, draft in enumerate(drafts)])
        verdict: Verdict = verifier.verify(logits, joined(drafts), random)
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
