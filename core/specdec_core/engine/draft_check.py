"""Checks on the host that a draft keeps its contract (`contracts/draft.py`), before the engine relies on it.

`device_check` checks drafts whose values are on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch

from specdec_core.config.fields import shown
from specdec_core.contracts.draft import DEAD, Draft

SUM_TOLERANCE = 1e-3
"""The largest allowed difference between 1 and the sum of a row of `q`, a distribution that draft tokens were drawn
from. Rounding in float32 stays far below."""


def check_draft(draft: Draft, max_draft_tokens: Sequence[int], vocab_size: int, device: torch.device) -> None:
    """Raise ValueError or TypeError if a draft breaks its contract (`contracts/draft.py`).

    max_draft_tokens: [batch], the most draft tokens of each request.
    """
    check_form(draft, max_draft_tokens, vocab_size, device)
    if draft.num_nodes:
        check_nodes(draft, vocab_size)
        check_probs(draft, vocab_size)


def check_form(draft: Draft, max_draft_tokens: Sequence[int], vocab_size: int, device: torch.device) -> None:
    """Check a draft's types, shapes and sizes, without reading tensor values. Raises ValueError or TypeError.

    max_draft_tokens: [batch], the most draft tokens of each request.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose returned {shown(draft)}, not a Draft")
    _check_sizes(draft, max_draft_tokens)
    _check_tensors(draft, vocab_size, device)


def check_nodes(draft: Draft, vocab_size: int) -> None:
    """Check the token ids and parents of the draft tokens. Raises ValueError.

    draft: has at least one draft token and passed `check_form`.
    """
    _check_range("token_ids", draft.host_token_ids, 0, vocab_size - 1, "draft ids of the target's vocabulary")
    parents = draft.host_parents
    index = np.arange(draft.num_nodes) - np.repeat(draft.offsets[:-1], draft.num_nodes_per_request)
    if draft.is_chain and np.array_equal(parents, index - 1):  # as most drafts are
        is_deeper = max(draft.num_nodes_per_request) > draft.max_depth
    else:
        if (parents >= index).any() or parents.min() < DEAD:
            raise ValueError(
                "a node's parent does not precede it: give an earlier node, -1 for the root or -2 for a dead node"
            )
        layout = draft.host_layout  # no depth in it is above max_depth
        if draft.is_chain and (layout.is_alive & (parents != index - 1)).any():
            raise ValueError(
                "is_chain is set, but a live node's parent is not the node before it: put dead nodes last in a chain, "
                "and leave is_chain False for trees"
            )
        below = layout.row_depths[layout.parent_rows] + 1
        is_deeper = (layout.is_alive & (below > draft.max_depth)).any()
    if is_deeper:
        raise ValueError(f"max_depth is {draft.max_depth}, but a node lies deeper: give the depth of the deepest one")


def check_probs(draft: Draft, vocab_size: int) -> None:
    """Check the scores of a draft, and `q`, the distributions that draft tokens were drawn from. Raises ValueError.

    draft: passed `check_nodes`.
    """
    if draft.scores is not None:
        scores = draft.on_host(draft.scores)
        if not (scores.min() >= 0 and scores.max() <= 1) and len(live := scores[draft.host_layout.is_alive]):
            _check_range("scores", live, 0, 1, "they are probabilities")
    if draft.q is not None and draft.q_rows is not None:
        layout, q_rows = draft.host_layout, draft.on_host(draft.q_rows)
        _check_range("q_rows", q_rows, -1, len(draft.q) - 1, "a row of q, or -1 for a node that was chosen")
        sampled = np.flatnonzero(layout.is_alive & (q_rows >= 0))
        if draft.q.numel():
            _check_columns(draft, vocab_size)
        if len(sampled):
            _check_q(draft, draft.q, q_rows[sampled], draft.host_token_ids[sampled], vocab_size)
        _check_siblings(q_rows[layout.is_alive], layout.parent_rows[layout.is_alive], len(layout.up))
        if not draft.with_replacement:
            _check_unlike(layout.parent_rows[sampled], draft.host_token_ids[sampled])


def _check_sizes(draft: Draft, max_draft_tokens: Sequence[int]) -> None:
    offsets = draft.offsets
    are_whole = isinstance(offsets, Sequence) and all(type(end) is int or isinstance(end, Integral) for end in offsets)
    if not are_whole or [*offsets[:1]] != [0] or len(offsets) != len(max_draft_tokens) + 1 or _falls(offsets):
        raise ValueError(f"its offsets are {offsets}: give 0 and the end of each of the {len(max_draft_tokens)} trees")
    counts = draft.num_nodes_per_request
    if any(n > most for n, most in zip(counts, max_draft_tokens, strict=True)):
        raise ValueError(f"it drafted {counts} nodes where at most {list(max_draft_tokens)} are allowed")
    least, most = min(1, draft.num_nodes), max(max_draft_tokens)
    if not isinstance(draft.max_depth, Integral) or not least <= draft.max_depth <= most:
        raise ValueError(
            f"max_depth is {shown(draft.max_depth)}: give the deepest node's depth, {least} to {most} here"
        )


def _falls(offsets: Sequence[int]) -> bool:
    return any(end < start for start, end in pairwise(offsets))


def _check_tensors(draft: Draft, vocab_size: int, device: torch.device) -> None:
    if (draft.q is None) != (draft.q_rows is None):
        raise ValueError("of q and q_rows one is None: give both if any node was sampled, else neither")
    nodes = (draft.num_nodes,)
    _check_tensor("token_ids", draft.token_ids, (torch.int64,), nodes, device)
    _check_tensor("parents", draft.parents, (torch.int32,), nodes, device)
    if draft.scores is not None:
        _check_tensor("scores", draft.scores, (torch.float32,), nodes, device)
    if draft.q is not None:
        num_rows, width = draft.q.shape if isinstance(draft.q, torch.Tensor) and draft.q.dim() == 2 else (-1, -1)
        _check_tensor("q", draft.q, (torch.float32, torch.float64), (num_rows, width), device)
        _check_tensor("q_rows", draft.q_rows, (torch.int32,), nodes, device)
        if draft.q_ids is not None and draft.q_to_target is not None:
            raise ValueError("both q_ids and q_to_target are given: the tokens of q stand in one of them")
        if draft.q_ids is not None:
            _check_tensor("q_ids", draft.q_ids, (torch.int64,), (num_rows, width), device)
        elif draft.q_to_target is not None:
            _check_tensor("q_to_target", draft.q_to_target, (torch.int64,), (width,), device)
        elif width != vocab_size:
            raise ValueError(f"q has {width} columns where the target has {vocab_size} token ids: give q_to_target")


def _check_tensor(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: give a tensor, {dtypes[0]} {list(shape)}")
    if tensor.dtype not in dtypes or tensor.shape != shape:
        allowed = "of two dimensions" if -1 in shape else list(shape)
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtypes[0]} {allowed}")
    if tensor.device.type != device.type or device.index not in (tensor.device.index, None):
        raise ValueError(f"{name} is on {tensor.device}, not on {device}: use the device of the build context")


def _check_range(name: str, values: np.ndarray, low: int, high: int, advice: str) -> None:
    if not (values.min() >= low and values.max() <= high):  # NaN as well
        raise ValueError(f"{name} are {values.min()} to {values.max()}, allowed are {low} to {high}: {advice}")


def _check_columns(draft: Draft, vocab_size: int) -> None:
    """Check the token ids that the columns of `q` stand for (q_to_target or q_ids): they must be in the vocabulary, and
    q_to_target must have no duplicates. Raises ValueError."""
    if draft.q_ids is not None:
        _check_range("q_ids", draft.on_host(draft.q_ids), 0, vocab_size - 1, "name token ids of the target")
    if draft.q_to_target is not None:
        mapping = draft.on_host(draft.q_to_target)
        _check_range("q_to_target", mapping, 0, vocab_size - 1, "name token ids of the target")
        is_named = np.zeros(vocab_size, dtype=bool)  # in each step: np.unique would take a hundred times as long
        is_named[mapping] = True
        if np.count_nonzero(is_named) < len(mapping):
            raise ValueError("q_to_target names a token id twice: give each of the draft's tokens another one")


def _check_q(draft: Draft, q: torch.Tensor, q_rows: np.ndarray, token_ids: np.ndarray, vocab_size: int) -> None:
    """Check the rows of `q` that draft tokens were drawn from. Each row must be a probability distribution that gives
    the tokens drawn from it a positive probability. Other rows are ignored. Raises ValueError.

    q_rows, token_ids: the row of `q` and the token id of each sampled draft token, without padding. Not empty.
    """
    # Two passes over q and no copy: a fifth of what a softmax costs.
    sums, least = q.sum(-1).numpy(), float(q.amin()) if q.numel() else 0.0
    if not (least >= 0 and abs(sums - 1).max() <= SUM_TOLERANCE):  # NaN as well
        used = np.unique(q_rows)
        sums, least = sums[used], float(q[used].amin()) if q.numel() else 0.0
        if not (least >= 0 and abs(sums - 1).max() <= SUM_TOLERANCE):
            raise ValueError(
                f"q is {least} at its least and its rows sum to {sums.min()} to {sums.max()}: give probabilities, "
                f"finite and not negative, of which each row sums to 1"
            )
    if draft.q_ids is not None:
        probs = _sparse_probs(draft.on_host(draft.q_ids), q.numpy(), q_rows, token_ids)
    elif draft.q_to_target is not None:
        mapping = draft.on_host(draft.q_to_target)
        column = np.full(vocab_size, -1)
        column[mapping] = np.arange(len(mapping))
        columns = column[token_ids]
        probs = np.where(columns >= 0, q.numpy()[q_rows, columns], 0)
    else:
        probs = q.numpy()[q_rows, token_ids]
    if (probs <= 0).any():
        raise ValueError(
            f"token {int(token_ids[np.argmin(probs)])} was sampled from a row of q that gives it no probability: give "
            f"the distribution that it was drawn from"
        )


def _sparse_probs(q_ids: np.ndarray, q: np.ndarray, q_rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    used = np.sort(q_ids[np.unique(q_rows)], axis=1)
    if (is_twice := used[:, 1:] == used[:, :-1]).any():
        raise ValueError(
            f"q_ids names token {int(used[:, 1:][is_twice][0])} twice in a row: give each entry of a row another token"
        )
    probs: np.ndarray = np.where(q_ids[q_rows] == token_ids[:, None], q[q_rows], 0).sum(axis=1)
    return probs


def _check_siblings(q_rows: np.ndarray, parent_rows: np.ndarray, num_rows: int) -> None:
    """Check that among siblings in a tree, the sampled ones come first and were drawn from the same row of `q`. Raises
    ValueError.

    q_rows: each draft token's row of `q`, -1 if it was not sampled.
    parent_rows: the index of each draft token's parent in the list of all roots and draft tokens of the batch.
    num_rows: the length of that list.
    """
    index, is_sampled = np.arange(len(q_rows)), q_rows >= 0
    chosen, sampled = index[~is_sampled], index[is_sampled]
    first_chosen = np.full(num_rows, len(q_rows))
    first_chosen[parent_rows[chosen][::-1]] = chosen[::-1]  # of several that are written, the last one stays
    if (first_chosen[parent_rows[sampled]] < sampled).any():
        raise ValueError("a sampled node stands after a chosen sibling: put sampled ones first, in the order drawn")
    row = np.empty(num_rows, dtype=q_rows.dtype)
    row[parent_rows[sampled]] = q_rows[sampled]
    if (row[parent_rows[sampled]] != q_rows[sampled]).any():
        raise ValueError("siblings were sampled from different rows of q: they share the one they were drawn from")


def _check_unlike(parent_rows: np.ndarray, token_ids: np.ndarray) -> None:
    """Check that siblings sampled without replacement have different tokens. Raises ValueError.

    parent_rows: the index of each sampled draft token's parent in the list of all roots and draft tokens of the batch.
    token_ids: the token id of each sampled draft token.
    """
    pairs = np.stack([parent_rows, token_ids], axis=1)
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"two sampled siblings are both token {int(found[counts > 1][0, 1])}, which cannot be drawn twice without "
            f"replacement: take it out of the distribution once it is drawn, or say with_replacement=True"
        )
