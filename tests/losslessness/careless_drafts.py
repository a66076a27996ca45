"""Drafts of two requests, with room for five draft tokens each: malformed ones, and sound ones that look odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from specdec_core import Draft

VOCAB_SIZE = 200


def sound() -> Draft:
    """Make a valid draft of two trees.

    The first tree has three sampled nodes, of which the first and the last are siblings. The second tree has a sampled
    node and a deterministic one.
    """
    return Draft(
        token_ids=torch.tensor([1, 2, 3, 4, 5]),
        parents=torch.tensor([-1, 0, -1, -1, -1], dtype=torch.int32),
        offsets=(0, 3, 5),
        max_depth=2,
        q=torch.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE),
        q_rows=torch.tensor([0, 1, 0, 2, -1], dtype=torch.int32),
        scores=torch.full((5,), 0.5),
    )


def changed(name: str, index: Any, value: Any) -> Draft:
    """Return the valid draft of `sound` with one change: at `index`, the tensor called `name` is `value`."""
    tensor = getattr(sound(), name).clone()
    tensor[index] = value
    return evolve(sound(), **{name: tensor})


def with_changes(**changes: Any) -> Draft:
    return evolve(sound(), **changes)


def mapped(mapping: list[int]) -> Draft:
    """Return the valid draft of `sound` with `q` over a draft vocabulary.

    mapping: the target's token id for each token of the draft vocabulary.
    """
    q = torch.full((3, len(mapping)), 1 / len(mapping))
    return with_changes(q=q, q_to_target=torch.tensor(mapping))


def sparse(q_ids: Any = None, **changes: Any) -> Draft:
    """Return the valid draft of `sound` with a sparse `q`: each row holds the probabilities of three tokens, whose ids
    are in q_ids."""
    q_ids = torch.tensor([[1, 3, 9], [9, 2, 0], [7, 4, 5]]) if q_ids is None else q_ids
    return with_changes(q=torch.full((3, 3), 1 / 3), q_ids=q_ids, **changes)


def a_chain(parents: list[int], **changes: Any) -> Draft:
    """Return the draft of `sound` as two chains of deterministic nodes. The first three nodes belong to the first
    request, the last two to the second.

    parents: the parents of the five nodes.
    """
    parents = torch.tensor(parents, dtype=torch.int32)
    return with_changes(parents=parents, q=None, q_rows=None, is_chain=True, **changes)


FULL_INDEX = torch.arange(5, dtype=torch.int32)
MALFORMED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [[1]], r"propose returned \[\[1\]\], not a Draft"),
    "too many nodes": (lambda: Draft.from_chains([[1] * 6, []]), r"drafted \[6, 0\] nodes where at most \[5, 5\]"),
    "a tree too few": (lambda: Draft.from_chains([[1]]), r"offsets are \(0, 1\): .* each of the 2 trees"),
    "a tree too many": (lambda: Draft.from_chains([[1]] * 3), r"offsets are \(0, 1, 2, 3\)"),
    "offsets that fall": (lambda: with_changes(offsets=(0, 6, 5)), r"offsets are \(0, 6, 5\)"),
    "offsets from 1": (lambda: with_changes(offsets=(1, 3, 5)), r"offsets are \(1, 3, 5\): give 0 and the end"),
    "offsets in a tensor": (lambda: with_changes(offsets=torch.tensor([0, 3, 5])), "offsets are tensor"),
    "offsets of fractions": (lambda: with_changes(offsets=(0, 2.5, 5)), r"offsets are \(0, 2.5, 5\)"),
    "fewer nodes than offsets say": (lambda: with_changes(offsets=(0, 3, 4)), r"token_ids is torch.int64 \[5\], not"),
    "token ids in a list": (lambda: with_changes(token_ids=[1] * 5), "token_ids is a list: give a tensor"),
    "token ids int32": (lambda: with_changes(token_ids=FULL_INDEX), "token_ids is torch.int32 .* not torch.int64"),
    "token ids on another device": (lambda: with_changes(token_ids=sound().token_ids.to("meta")), "is on meta, not on"),
    "token ids past the vocabulary": (lambda: changed("token_ids", 2, 200), "token_ids are 1 to 200, allowed .* 199"),
    "token ids below 0": (lambda: changed("token_ids", 2, -1), "token_ids are -1 to 5, allowed are 0 to 199"),
    "parents int64": (lambda: with_changes(parents=sound().parents.long()), "parents is torch.int64 .* torch.int32"),
    "too few parents": (lambda: with_changes(parents=sound().parents[:4]), r"parents is torch.int32 \[4\], not"),
    "a parent that comes later": (lambda: changed("parents", 0, 1), "parent does not precede it: give an earlier node"),
    "its own parent": (lambda: changed("parents", 1, 1), "parent does not precede it"),
    "a parent in another tree": (lambda: changed("parents", 4, 1), "parent does not precede it"),
    "a parent below -2": (lambda: changed("parents", 1, -3), "-1 for the root or -2 for a dead node"),
    "a tree that claims to be a chain": (lambda: with_changes(is_chain=True), "is_chain is set, but"),
    "a chain with a dead node in the middle": (
        lambda: a_chain([-1, -2, 0, -1, 0]),
        "is_chain is set, .* dead nodes last",
    ),
    "max_depth 0": (lambda: with_changes(max_depth=0), "max_depth is 0: .* 1 to 5 here"),
    "max_depth too small": (lambda: with_changes(max_depth=1), "max_depth is 1, but a node lies deeper"),
    "max_depth too large": (lambda: with_changes(max_depth=10**9), "max_depth is 1000000000: .* 1 to 5 here"),
    "max_depth of another kind": (lambda: with_changes(max_depth=None), "max_depth is None"),
    "a chain deeper than it says": (
        lambda: evolve(Draft.from_chains([[1, 2, 3], [1]]), max_depth=2),
        "max_depth is 2, but a node lies deeper",
    ),
    "q without q_rows": (lambda: with_changes(q_rows=None), "of q and q_rows one is None"),
    "q_rows without q": (lambda: with_changes(q=None), "of q and q_rows one is None"),
    "q of one dimension": (lambda: with_changes(q=torch.ones(200)), r"q is torch.float32 \[200\].* two dimensions"),
    "q in bfloat16": (lambda: with_changes(q=sound().q.bfloat16()), "q is torch.bfloat16 .* not torch.float32"),
    "q of another width": (lambda: with_changes(q=torch.ones(3, 1)), "q has 1 columns where the target has 200"),
    "q with NaN": (lambda: changed("q", (1, 7), float("nan")), "q is nan at its least"),
    "q with infinity": (lambda: changed("q", (1, 7), float("inf")), "rows sum to 1.0.* to inf: give probabilities"),
    "q below 0": (lambda: changed("q", (0, slice(7, 9)), torch.tensor([-0.1, 0.11])), "q is -0.1.* at its least"),
    "q that is logits": (lambda: with_changes(q=torch.zeros(3, 200)), "rows sum to 0.0 to 0.0: give probabilities"),
    "q_rows int64": (lambda: with_changes(q_rows=sound().q_rows.long()), "q_rows is torch.int64 .* not torch.int32"),
    "q_rows past the last": (lambda: changed("q_rows", 3, 3), "q_rows are -1 to 3, allowed are -1 to 2"),
    "q_rows below -1": (lambda: changed("q_rows", 4, -2), "q_rows are -2 to 2, allowed are -1 to 2"),
    "a sampled node after a chosen one": (lambda: changed("q_rows", 0, -1), "sampled node stands after a chosen sib"),
    "a sampled node between chosen ones": (
        lambda: with_changes(
            parents=torch.full((5,), -1, dtype=torch.int32), q_rows=torch.tensor([-1, 0, -1, -1, -1], dtype=torch.int32)
        ),
        "sampled node stands after a chosen sib",
    ),
    "siblings from two rows": (lambda: changed("q_rows", 2, 1), "siblings were sampled from different rows"),
    "a token that cannot be drawn": (
        lambda: with_changes(q=torch.eye(VOCAB_SIZE)[[1, 2, 9]]),
        "token 3 was sampled from a row of q that gives it no probability",
    ),
    "a draft vocabulary of another width": (
        lambda: with_changes(q_to_target=torch.arange(9)),
        r"q_to_target is torch.int64 \[9\], not torch.int64 \[200\]",
    ),
    "a draft vocabulary past the target's": (lambda: mapped([1, 2, 3, 4, 200]), "q_to_target are 1 to 200, allowed"),
    "a draft vocabulary that names a token twice": (lambda: mapped([1, 2, 3, 4, 4]), "names a token id twice"),
    "a sibling drawn twice without replacement": (
        lambda: evolve(changed("token_ids", 2, 1), with_replacement=False),
        "two sampled siblings are both token 1, which cannot be drawn twice",
    ),
    "a token outside of the draft vocabulary": (lambda: mapped([1, 2, 3, 9]), "token 4 was sampled from a row"),
    "q_ids that name a token twice": (lambda: sparse(torch.tensor([[1, 3, 3], [9, 2, 0], [7, 4, 5]])), "token 3 twice"),
    "q_ids past the vocabulary": (
        lambda: sparse(torch.tensor([[1, 3, 200], [9, 2, 0], [7, 4, 5]])),
        "q_ids are 0 to 200, allowed are 0 to 199",
    ),
    "q_ids below 0": (lambda: sparse(torch.tensor([[1, 3, -1], [9, 2, 0], [7, 4, 5]])), "q_ids are -1 to 9, allowed"),
    "q_ids of another width": (
        lambda: sparse(torch.arange(6).view(3, 2)),
        r"q_ids is torch.int64 \[3, 2\], not .* \[3, 3\]",
    ),
    "q_ids int32": (lambda: sparse(torch.arange(9).view(3, 3).int()), "q_ids is torch.int32 .* not torch.int64"),
    "q_ids beside q_to_target": (lambda: sparse(q_to_target=torch.arange(3)), "both q_ids and q_to_target are given"),
    "a token that q_ids does not name": (
        lambda: sparse(torch.tensor([[1, 8, 9], [9, 2, 0], [7, 4, 5]])),
        "token 3 was s",
    ),
    "scores that are NaN": (lambda: changed("scores", 1, float("nan")), "scores are nan to nan, allowed are 0 to 1"),
    "scores above 1": (lambda: changed("scores", 1, 2), "scores are 0.5 to 2.0, allowed are 0 to 1"),
}

SOUND: dict[str, Callable[[], Draft]] = {
    "sampled": sound,
    "siblings without replacement": lambda: with_changes(with_replacement=False),
    "float64": lambda: with_changes(q=sound().q.double()),
    "sums that are a little off": lambda: with_changes(q=sound().q * 1.0009),
    "a draft vocabulary": lambda: mapped([5, 4, 3, 2, 1]),
    "dead nodes below a dead one": lambda: with_changes(
        parents=torch.tensor([-2, 0, 1, -1, -2], dtype=torch.int32), max_depth=1, q=None, q_rows=None
    ),
    "dead nodes in any order": lambda: evolve(
        with_changes(parents=torch.full((5,), -2, dtype=torch.int32)),
        q_rows=torch.tensor([-1, 0, -1, 1, 2], dtype=torch.int32),
    ),
    "a chain with a dead tail": lambda: a_chain([-1, 0, -2, -2, 0]),
    "a few tokens in each row of q": sparse,
    "dead nodes with any q and scores": lambda: evolve(
        with_changes(parents=torch.tensor([-1, -2, 1, -2, -1], dtype=torch.int32)),
        q=torch.cat([sound().q[:1], torch.full((2, VOCAB_SIZE), float("nan"))]),
        q_rows=torch.tensor([0, 1, 2, 0, -1], dtype=torch.int32),
        scores=torch.tensor([0.5, float("nan"), -1, 2, 0.5]),
    ),
    "no nodes": lambda: evolve(Draft.from_chains([[], []]), max_depth=5),
}
