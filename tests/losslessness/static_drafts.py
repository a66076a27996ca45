"""The draft trees of a fixed shape, chains among them, that a draft head must draft, computed from its logits."""

from __future__ import annotations

from typing import Protocol

import torch
from probe_recorder import Drafted
from recorded_runs import Expected

from specdec_core import TokenTree

MARGIN = 1e-3
NUDGE, MOST_MOVED = 1e-6, 1e-4
"""NUDGE: relative noise on the features, which shows how far rounding can move the draft's probabilities. MOST_MOVED: a
draft is compared only if no probability moved further. A head's outputs are its next inputs, so that in one of a
thousand chains float32's rounding reaches the third decimal."""
Path = tuple[int, ...]


class LogitsAfter(Protocol):
    """Computes a draft head's logits in float64."""

    def __call__(self, path: Path, *, is_nudged: bool = False) -> torch.Tensor:
        """Return the logits, float64 [draft_vocab], after the draft tokens `path`, which follow the request's last
        token. is_nudged: with noise of NUDGE on the features."""


def static_draft(
    drafted: Drafted,
    shape: TokenTree,
    after: LogitsAfter,
    ids: torch.Tensor,
    *,
    is_sampled: bool,
    num_target_tokens: int | None = None,
) -> Expected:
    """Return the draft that a proposer should have made.

    drafted: the recorded draft. Sampled tokens are copied from it, and only their probabilities are computed.
    ids: int64 [draft_vocab], the target's id of each token in the draft head's vocabulary.
    is_sampled: whether draft tokens are sampled at temperatures above 0.
    num_target_tokens: the size of the target's vocabulary, if draft probabilities are over all of it; None: they are
        over the draft head's vocabulary.
    """
    tokens: list[int] = []
    parents: list[int] = []
    all_probs: list[torch.Tensor | None] = []
    is_clear = True
    numbers: dict[Path, int] = {(): -1}
    for number, path in enumerate(shape.paths[: drafted.max_draft_tokens]):
        numbers[path] = number
        above = tuple(tokens[numbers[path[: i + 1]]] for i in range(len(path) - 1))
        logits = after(above)
        parents.append(numbers[path[:-1]])
        if is_sampled and drafted.temperature > 0:
            probs = (logits / drafted.temperature).softmax(dim=-1)
            if float(probs.max()) > 1 - 2e-7 and not shape.is_chain:
                return Expected([], [], [], is_clear=False)  # there may be nothing left for a sibling to be
            tokens.append(drafted.token_ids[number])
            moved = (after(above, is_nudged=True) / drafted.temperature).softmax(dim=-1)
            is_clear &= float((moved - probs).abs().max()) < MOST_MOVED
            if num_target_tokens is not None:
                probs = torch.zeros(num_target_tokens, dtype=probs.dtype).index_copy(0, ids, probs)
            all_probs.append(probs)
            continue
        rank = path[-1]
        ordered = logits.sort(descending=True)
        is_clear &= bool((-ordered.values.diff()[max(rank - 1, 0) : rank + 1]).min() > MARGIN)
        tokens.append(int(ids[ordered.indices[rank]]))
        all_probs.append(None)
    return Expected(tokens, parents, all_probs, is_clear)


def inner_paths(drafted: Drafted) -> list[Path]:
    """Return the token paths from the root (the request's last token) to all nodes that have children, longest path
    first."""
    paths: dict[int, Path] = {-1: ()}
    for number, (token, parent) in enumerate(zip(drafted.token_ids, drafted.parents, strict=True)):
        if parent in paths:  # others are dead
            paths[number] = (*paths[parent], token)
    return sorted((paths[parent] for parent in set(drafted.parents) & set(paths)), key=len, reverse=True)
