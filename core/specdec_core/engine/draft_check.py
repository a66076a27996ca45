"""Whether a draft is what its contract says, looked at before the engine relies on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch

from specdec_core.types import DEAD, Draft

SUM_TOLERANCE = 1e-3
"""How far a row of q may be from summing to 1. Rounding in float32 stays far below."""


def check_draft(draft: Draft, max_draft_tokens: Sequence[int], vocab_size: int, device: torch.device) -> None:
    """Raise ValueError or TypeError where a draft is not as its contract says. Values are looked at on a CPU only: it
    would cost a synchronisation elsewhere."""
    if not isinstance(draft, Draft):
        raise TypeError(f"propose returned {draft!r}, not a Draft")
    _check_sizes(draft, max_draft_tokens)
    _check_tensors(draft, vocab_size, device)
    if draft.num_nodes == 0 or device.type != "cpu":
        return
    token_ids, parents = draft.token_ids.numpy(), draft.parents.numpy()
    _check_range("token_ids", token_ids, 0, vocab_size - 1, "draft ids of the target's vocabulary")
    starts = np.repeat(draft.offsets[:-1], draft.num_nodes_per_request)
    _check_parents(draft, parents, np.arange(draft.num_nodes) - starts)
    if draft.scores is not None:
        _check_range("scores", draft.scores.numpy(), 0, 1, "they are probabilities")
    if draft.q is not None and draft.q_rows is not None:
        q_rows, has_parent = draft.q_rows.numpy(), parents != DEAD
        requests = np.repeat(np.arange(draft.batch_size), draft.num_nodes_per_request)
        parent_rows = starts + requests + 1 + parents  # among roots and nodes
        _check_q(draft, draft.q, q_rows, vocab_size)
        _check_siblings(q_rows[has_parent], parent_rows[has_parent], draft.num_nodes + draft.batch_size)
        if not draft.with_replacement:
            is_sampled = has_parent & (q_rows >= 0)
            _check_unlike(parent_rows[is_sampled], token_ids[is_sampled])


def _check_sizes(draft: Draft, max_draft_tokens: Sequence[int]) -> None:
    offsets = draft.offsets
    are_whole = isinstance(offsets, Sequence) and all(isinstance(end, Integral) for end in offsets)
    if not are_whole or [*offsets[:1]] != [0] or len(offsets) != len(max_draft_tokens) + 1 or _falls(offsets):
        raise ValueError(f"its offsets are {offsets}: give 0 and the end of each of the {len(max_draft_tokens)} trees")
    counts = draft.num_nodes_per_request
    if any(n > most for n, most in zip(counts, max_draft_tokens, strict=True)):
        raise ValueError(f"it drafted {counts} nodes where at most {list(max_draft_tokens)} are allowed")
    least, most = min(1, draft.num_nodes), max(max_draft_tokens)
    if not isinstance(draft.max_depth, Integral) or not least <= draft.max_depth <= most:
        raise ValueError(f"max_depth is {draft.max_depth!r}: give the deepest node's depth, {least} to {most} here")


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
        if draft.q_to_target is not None:
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
    if tensor.device.type != device.type:
        raise ValueError(f"{name} is on {tensor.device}, not on {device}: use the device of the build context")


def _check_range(name: str, values: np.ndarray, low: int, high: int, advice: str) -> None:
    if not (values.min() >= low and values.max() <= high):  # NaN as well
        raise ValueError(f"{name} are {values.min()} to {values.max()}, allowed are {low} to {high}: {advice}")


def _check_parents(draft: Draft, parents: np.ndarray, index: np.ndarray) -> None:
    """index int64 [num_nodes]: each node's own within its request's tree."""
    if draft.is_chain:
        if not np.array_equal(parents, index - 1):
            raise ValueError("is_chain is set, but a node's parent is not the node before it")
        is_deeper = max(draft.num_nodes_per_request) > draft.max_depth
    else:
        if (parents >= index).any() or parents.min() < DEAD:
            raise ValueError(
                "a node's parent does not precede it: give an earlier node, -1 for the root or -2 for a dead node"
            )
        layout = draft.host_layout  # no depth in it is above max_depth
        below = layout.row_depths[layout.parent_rows] + 1
        is_deeper = (layout.is_alive & (below > draft.max_depth)).any()
    if is_deeper:
        raise ValueError(f"max_depth is {draft.max_depth}, but a node lies deeper: give the depth of the deepest one")


def _check_q(draft: Draft, q: torch.Tensor, q_rows: np.ndarray, vocab_size: int) -> None:
    _check_range("q_rows", q_rows, -1, len(q) - 1, "a row of q, or -1 for a node that was chosen")
    if not q.numel():
        return
    sums, least = q.sum(-1).numpy(), float(q.amin())  # two passes over q and no copy: a fifth of what a softmax costs
    if not (least >= 0 and abs(sums - 1).max() <= SUM_TOLERANCE):  # NaN as well
        raise ValueError(
            f"q is {least} at its least and its rows sum to {sums.min()} to {sums.max()}: give probabilities, finite "
            f"and not negative, of which each row sums to 1"
        )
    sampled = np.flatnonzero(q_rows >= 0)
    drawn = draft.token_ids.numpy()[sampled]
    if draft.q_to_target is not None:
        mapping = draft.q_to_target.numpy()
        _check_range("q_to_target", mapping, 0, vocab_size - 1, "name token ids of the target")
        if len(np.unique(mapping)) < len(mapping):
            raise ValueError("q_to_target names a token id twice: give each of the draft's tokens another one")
        column = np.full(vocab_size, -1)
        column[mapping] = np.arange(len(mapping))
        drawn = column[drawn]
    probs = np.where(drawn >= 0, q.numpy()[q_rows[sampled], drawn], 0)
    if (probs <= 0).any():
        node = int(sampled[np.argmin(probs)])
        raise ValueError(
            f"token {int(draft.token_ids[node])} was sampled from a row of q that gives it no probability: give the "
            f"distribution that it was drawn from"
        )


def _check_siblings(q_rows: np.ndarray, parent_rows: np.ndarray, num_rows: int) -> None:
    """Of the nodes that have a parent. parent_rows: below num_rows, equal for siblings."""
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
    """Of the sampled nodes of a draft that says with_replacement=False."""
    pairs = np.stack([parent_rows, token_ids], axis=1)
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"two sampled siblings are both token {int(found[counts > 1][0, 1])}, which cannot be drawn twice without "
            f"replacement: take it out of the distribution once it is drawn, or say with_replacement=True"
        )
