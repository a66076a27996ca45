"""The draft trees with which the kit enumerates a verifier's outcomes, and the random models behind them."""

from __future__ import annotations

import torch
from attrs import evolve

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.verifier import RandomSource
from specdec_testing.drawn_trees import SAMPLED as S, Model, Shape, draw, random_model

CHAINS = {
    "nothing": Shape((), (), is_chain=True),
    "one": Shape((-1,), (S,), is_chain=True),
    "chain": Shape((-1, 0, 1), (S, S, S), is_chain=True),
    "chain, partly chosen": Shape((-1, 0, 1), (S, 1, S), is_chain=True),
    "chosen chain": Shape((-1, 0), (1, 0), is_chain=True),
}
TREES = {
    "siblings": Shape((-1, -1, -1), (S, S, S)),
    "siblings, no two alike": Shape((-1, -1), (S, S), with_replacement=False),
    "a chosen sibling": Shape((-1, -1, 0, 1), (S, 1, S, S)),
    "chosen siblings": Shape((-1, -1, 0, 1), (0, 1, 1, 0)),
    "chosen siblings, two alike": Shape((-1, -1, -1, 1, 2), (S, 1, 1, 0, S)),
    "two levels": Shape((-1, -1, 0, 0), (S, S, S, S)),
    "two levels, no two alike": Shape((-1, -1, 0, 0, 1), (S, S, S, S, 0), with_replacement=False),
    "depth first": Shape((-1, 0, 1, 0, -1), (S, S, 1, S, S)),
    "dead nodes": Shape((-2, -1, -1, 0, 2), (1, S, S, 0, S)),
    "a sampled node below chosen ones": Shape((-1, -1, 0, 1, 1), (0, 1, S, S, S)),
}
DEAD_CHAINS = {
    "a dead tail": Shape((-1, 0, DEAD), (S, S, S), is_chain=True),
    "a long dead tail": Shape((-1, DEAD, DEAD), (S, 1, S), is_chain=True),
    "a tail that hangs from a dead node": Shape((-1, DEAD, 1), (S, S, S), is_chain=True),
    "a chosen node before a dead tail": Shape((-1, 0, DEAD), (1, S, 0), is_chain=True),
    "all dead": Shape((DEAD, DEAD), (S, 1), is_chain=True),
}
DEAD_TREES = {
    "dead leaves": Shape((-1, -1, DEAD, 0, DEAD), (S, S, S, S, 1)),
    "a dead inner node": Shape((-1, DEAD, 1, 2, 0), (S, S, S, 1, S)),
    "dead siblings, no two alike": Shape((DEAD, -1, -1, DEAD, 0), (S, S, S, S, S), with_replacement=False),
    "a dead tree": Shape((DEAD, DEAD, 0), (S, 1, S)),
}
SPARSE = {
    "sparse chain": Shape((-1, 0), (S, S), is_chain=True),
    "sparse, partly chosen, a dead tail": Shape((-1, 0, DEAD), (1, S, S), is_chain=True),
    "sparse siblings": Shape((-1, -1, 0), (S, S, S)),
    "sparse, no two alike": Shape((-1, -1, 0), (S, S, S), with_replacement=False),
    "sparse, chosen and dead nodes": Shape((-1, -1, DEAD, 1), (S, 1, S, S)),
}
"""Shapes whose rows of `q` have FEW columns, with `q_ids`."""
SHAPES = CHAINS | TREES | DEAD_CHAINS | DEAD_TREES | SPARSE
FEW = 3

_LIVE = Shape((-1, 0), (S, S), is_chain=True)
PAIRS = {
    "two chains": (_LIVE, Shape((-1,), (S,), is_chain=True)),
    "a dead tail beside a chain": (_LIVE, Shape((-1, DEAD), (S, S), is_chain=True)),
    "a dead tail before a chain": (Shape((-1, DEAD), (S, S), is_chain=True), _LIVE),
    "all dead beside a chain": (Shape((DEAD, DEAD), (1, S), is_chain=True), _LIVE),
    "a dead tail beside a tree": (Shape((-1, -1), (S, S)), Shape((-1, DEAD), (S, S))),
}
"""Shapes of two requests of a batch."""


def models(vocab: int, seed: int, shape: Shape) -> tuple[Model, Model]:
    """Return a random target and draft model. If siblings are sampled without replacement, the draft model gives no
    token probability 0."""
    q = random_model(vocab, 4, seed + 1000, impossible=0.15 if shape.with_replacement else 0)
    return random_model(vocab, 4, seed), q


def sparse_models(seed: int) -> tuple[Model, Model]:
    """Return models of four tokens. Every row of the draft model has FEW possible ones."""
    target, q = random_model(4, 4, seed), random_model(4, 4, seed + 1000, impossible=0)
    for probs in q.values():
        probs[probs.argmin()] = 0
        probs /= probs.sum()
    return target, q


def in_few_columns(draft: Draft, num_columns: int = FEW) -> Draft:
    """Return the draft with a sparse `q`. Each row keeps its num_columns likeliest tokens, in an order that differs
    between rows."""
    assert draft.q is not None
    order = draft.q.argsort(dim=1, descending=True)[:, :num_columns]
    ids = torch.stack([row.roll(i) for i, row in enumerate(order)]) if len(order) else order
    return evolve(draft, q=draft.q.gather(1, ids), q_ids=ids)


def draw_sparse(shape: Shape, q: Model, random: RandomSource) -> Draft:
    return in_few_columns(draw(shape, q, random))


def without_dead(shape: Shape) -> Shape:
    """Return the shape without its dead nodes."""
    live: list[int] = []
    for node, parent in enumerate(shape.parents):
        if parent == -1 or parent in live:
            live.append(node)
    places = {-1: -1} | {node: place for place, node in enumerate(live)}
    parents = tuple(places[shape.parents[node]] for node in live)
    return evolve(shape, parents=parents, tokens=tuple(shape.tokens[node] for node in live))
