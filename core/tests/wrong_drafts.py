"""Random drafts that keep the contract of `Draft`, and random changes to drafts that may break the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import evolve

from specdec_core.contracts.draft import DEAD, Draft, DraftTree

VOCAB, MOST = 6, 7
"""The size of the target's vocabulary, and max_draft_tokens of every request."""


def random_draft(rng: np.random.Generator) -> Draft:
    """Return a batch of chains or trees with dead (padding), deterministic and sampled nodes.

    The draft probabilities `q` are missing, dense, over a part of the vocabulary (q_to_target), or sparse (q_ids).
    """
    is_chain, with_replacement = bool(rng.integers(2)), bool(rng.integers(2))
    kind = rng.choice(["none", "dense", "mapped", "sparse"])
    width = VOCAB if kind in ("none", "dense") else 4
    mapping = rng.permutation(VOCAB)[:width]
    trees: list[DraftTree] = []
    q_rows: list[int] = []
    rows: list[tuple[np.ndarray, np.ndarray]] = []  # probabilities and token ids
    for _ in range(int(rng.integers(1, 4))):
        tokens: list[int] = []
        parents = random_parents(rng, is_chain)
        num_sampled = {parent: 0 if kind == "none" else int(rng.integers(3)) for parent in {*parents}}
        row_of: dict[int, int] = {}
        drawn: dict[int, set[int]] = {parent: set() for parent in parents}
        for parent in parents:
            row = -1
            if num_sampled[parent]:
                num_sampled[parent] -= 1
                if parent not in row_of:
                    row_of[parent] = len(rows)
                    ids = mapping if kind == "mapped" else rng.permutation(VOCAB)[:width]
                    ids = np.arange(VOCAB) if kind == "dense" else ids
                    weights = rng.random(width) * (rng.random(width) < 0.8)
                    weights[:3] += 0.1
                    rows.append((weights / weights.sum(), ids))
                row = row_of[parent]
                probs, ids = rows[row]
                possible = [int(t) for t, p in zip(ids, probs, strict=True) if p > 0]
                left = [t for t in possible if with_replacement or t not in drawn[parent]]
                tokens.append(int(rng.choice(left)))
                drawn[parent].add(tokens[-1])
            else:
                tokens.append(int(rng.integers(VOCAB)))
            q_rows.append(row)
        trees.append(DraftTree(tokens, parents))
    draft = Draft.from_trees(trees)
    changes: dict[str, Any] = {"is_chain": is_chain, "with_replacement": with_replacement}
    if rng.integers(2):
        changes["scores"] = torch.tensor(rng.random(draft.num_nodes), dtype=torch.float32)
    if kind != "none":
        changes["q"] = torch.tensor(np.array([probs for probs, _ in rows]).reshape(-1, width), dtype=torch.float32)
        changes["q_rows"] = torch.tensor(q_rows, dtype=torch.int32)
    if kind == "mapped":
        changes["q_to_target"] = torch.tensor(mapping)
    if kind == "sparse":
        changes["q_ids"] = torch.tensor(np.array([ids for _, ids in rows], dtype=np.int64).reshape(-1, width))
    return evolve(draft, **changes)


def random_parents(rng: np.random.Generator, is_chain: bool) -> list[int]:
    num_nodes = int(rng.integers(MOST + 1))
    if not is_chain:
        return [int(rng.integers(-1, i)) if rng.random() < 0.85 else DEAD for i in range(num_nodes)]
    length = int(rng.integers(num_nodes + 1)) if rng.random() < 0.5 else num_nodes
    hanging = [i - 1 if i > length and rng.random() < 0.3 else DEAD for i in range(length, num_nodes)]
    return [*range(-1, length - 1), *hanging]


STRANGE = {
    "token_ids": [-1, 0, 1, VOCAB - 1, VOCAB, 2**40],
    "parents": [-(2**31), -3, DEAD, -1, 0, 1, 2, 5, 2**31 - 1],
    "q_rows": [-(2**31), -2, -1, 0, 1, 2, 3, 50, 2**31 - 1],
    "q_to_target": [-1, 0, 1, 2, VOCAB - 1, VOCAB, 2**40],
    "q_ids": [-1, 0, 1, 2, VOCAB - 1, VOCAB, 2**40],
    "scores": [float("nan"), float("inf"), -0.1, 0.0, 1.0, 1.1],
    "q": [float("nan"), float("inf"), -0.1, 0.0, 0.3, 1.0],
}


def changed_somewhere(draft: Draft, rng: np.random.Generator) -> Draft:
    """Return a copy of the draft with one tensor entry set to an unusual value, or another field changed. The copy may
    still keep the contract."""
    names = [name for name in STRANGE if (tensor := getattr(draft, name)) is not None and tensor.numel()]
    name = rng.choice([*names, "is_chain", "max_depth", "with_replacement"])
    if name == "max_depth":
        return evolve(draft, max_depth=int(rng.integers(1, MOST + 1)) if draft.num_nodes else 0)
    if name in ("is_chain", "with_replacement"):
        return evolve(draft, **{name: not getattr(draft, name)})
    tensor = getattr(draft, name).clone()
    tensor.view(-1)[int(rng.integers(tensor.numel()))] = rng.choice(STRANGE[name]).item()
    return evolve(draft, **{name: tensor})
