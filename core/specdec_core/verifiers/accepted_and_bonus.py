"""Makes a verdict from a verifier's decisions: the accepted draft tokens, then the recovered or bonus token.

The last token is drawn from the row of target logits at which acceptance ends. It is the bonus token if no draft token
follows that row, else the recovered token. `greedy` and `chosen` pick a token at every row of the accepted path:
`follow` finds the path in tokens picked at all rows, and `walk` picks tokens along the path only. The other verifiers
draw a token only at the path's end, and `trace` appends it to the accepted ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import Verdict


def follow(tokens: torch.Tensor, draft: Draft) -> Verdict:
    """From each root (a request's last token) on, accept the child that equals the token picked after its parent.

    tokens: int64 [num_rows], the token picked at each row of logits; -1: the row's logits are not finite. There is a
        row per root and per draft token.

    Of two equal siblings the first is accepted. Lossless if `tokens` are the target's own draws. The verdict is on the
    host.
    """
    layout, decided = draft.host_layout, tokens.cpu().numpy()
    if not draft.max_depth:  # plain decoding: the roots' tokens
        return Verdict(
            token_ids=torch.from_numpy(decided[:, None]),
            rows=torch.from_numpy(layout.root_rows.astype(np.int32)[:, None]),
            num_accepted=torch.zeros(len(decided), dtype=torch.int32),
        )
    num_rows = end = len(decided)  # row `end` stands for "no such child", and is its own child
    matches = (decided[layout.parent_rows] == draft.host_token_ids) & layout.is_alive
    matching = matches.nonzero()[0][::-1]
    child = np.full(num_rows + 1, end)
    child[layout.parent_rows[matching]] = layout.node_rows[matching]  # the last write wins: the first sibling

    rows = np.empty((draft.batch_size, draft.max_depth + 1), dtype=np.int64)
    rows[:, 0] = layout.root_rows
    for depth in range(draft.max_depth):
        rows[:, depth + 1] = child[rows[:, depth]]
    on_path = rows != end
    num_accepted = on_path.sum(axis=1) - 1
    rows = np.where(on_path, rows, rows[np.arange(len(rows)), num_accepted][:, None])
    failed = decided[rows[:, -1]] < 0  # no draft token equals -1: the path ends there
    if failed.any():
        on_path[failed], num_accepted[failed] = False, 0
    return Verdict(
        token_ids=torch.from_numpy(np.where(on_path, decided[rows], -1)),
        rows=torch.from_numpy(rows.astype(np.int32)),
        num_accepted=torch.from_numpy(num_accepted.astype(np.int32)),
    )


def walk(
    pick: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    draft: Draft,
    requests: torch.Tensor,
) -> Verdict:
    """Return the verdict of `follow` for some requests, but pick tokens only at the rows of their accepted paths, depth
    by depth: of a tree with dozens of nodes, a path has a few. The verdict of other requests is empty.

    pick: called with rows, requests and depths, each int64 [n], for one row of each request. Returns the tokens picked
        there, int64 [n]; -1: the row's logits are not finite.
    requests: int64, indices into the batch, ascending.

    On a CPU a request whose path has ended is not asked about again. On a GPU it is, at its last row and without
    effect, since the host does not know.
    """
    layout, can_leave = draft.layout, requests.device.type == "cpu"
    num_rows, width = len(layout.up), draft.max_depth + 1
    node_requests = layout.row_requests[layout.node_rows]
    at = layout.root_rows  # [batch]   the last row of each request's path so far
    rows = at.unsqueeze(1).repeat(1, width)
    token_ids, token = torch.full_like(rows, -1), torch.full_like(at, -1)
    is_walking, failed = torch.zeros((2, draft.batch_size), dtype=torch.bool, device=at.device)
    is_walking[requests] = True
    for depth in range(width):
        picked = pick(at[requests], requests, torch.full_like(requests, depth))
        goes_on = is_walking[requests]
        token[requests] = picked
        token_ids[requests, depth] = picked.masked_fill(~goes_on, -1)
        failed[requests] |= goes_on & (picked < 0)
        if depth + 1 == width:
            break
        matches = layout.is_alive & is_walking[node_requests] & (draft.token_ids == token[node_requests])
        nodes = layout.node_rows.masked_fill(~(matches & (layout.parent_rows == at[node_requests])), num_rows)
        child = torch.full_like(at, num_rows).scatter_reduce_(0, node_requests, nodes, "amin")  # the first sibling
        is_walking = child < num_rows
        at = torch.where(is_walking, child, at)
        rows[:, depth + 1 :] = at.unsqueeze(1)
        if can_leave:
            requests = is_walking.nonzero().squeeze(1)
            if not len(requests):
                break
    token_ids.masked_fill_(failed.unsqueeze(1), -1)
    num_accepted = ((token_ids >= 0).sum(1) - 1).clamp(min=0)
    return Verdict(token_ids, rows.to(torch.int32), num_accepted.to(torch.int32))


def trace(
    ends: torch.Tensor, token_ids: torch.Tensor, is_possible: torch.Tensor, is_nan: torch.Tensor, draft: Draft
) -> Verdict:
    """Make a verdict from the last accepted rows, by walking up the draft trees to the roots (each request's last
    token).

    ends: int64 [batch], each request's last accepted row of target logits: its root's if no draft token is accepted.
    token_ids: int64 [batch], the recovered or bonus token that follows that row.
    is_possible: bool [num_nodes], whether the target gives each draft token a probability above 0 after its parent.
    is_nan: bool [num_rows], whether the target's probabilities after each row are NaN (from logits that are not
        finite).

    A request fails if the target's probabilities are NaN after its root or after any draft token that could be
    accepted, whatever was drawn. A failed request starts over without a draft: if failing depended on the draws, the
    output would be biased.
    """
    layout = draft.layout
    upwards = [ends]
    for _ in range(draft.max_depth):
        upwards.append(layout.up[upwards[-1]])
    num_accepted = layout.row_depths[ends].unsqueeze(1)  # [batch, 1]
    step = torch.arange(draft.max_depth + 1, device=ends.device)
    rows = torch.stack(upwards, dim=1).gather(1, (num_accepted - step).clamp(min=0))

    tokens = torch.full((len(layout.row_requests),), -1, dtype=torch.int64, device=ends.device)
    tokens[layout.node_rows] = draft.token_ids
    accepted = torch.where(step < num_accepted, tokens[rows.roll(-1, dims=1)], -1)
    failed = _may_meet_nan(is_possible, is_nan, draft).unsqueeze(1)
    token_ids = torch.where(step == num_accepted, token_ids.unsqueeze(1), accepted).masked_fill(failed, -1)
    num_accepted = num_accepted.masked_fill(failed, 0).squeeze(1)
    return Verdict(token_ids=token_ids, rows=rows.to(torch.int32), num_accepted=num_accepted.to(torch.int32))


def _may_meet_nan(is_possible: torch.Tensor, is_nan: torch.Tensor, draft: Draft) -> torch.Tensor:
    """bool [batch]   whether the probabilities after the root, or after any draft token that the target could accept,
    are NaN. The parameters are those of `trace`."""
    layout = draft.layout
    may_be_met = torch.ones_like(is_nan)
    may_be_met[layout.node_rows] = layout.is_alive & is_possible
    for _ in range(draft.max_depth - 1):
        may_be_met &= may_be_met[layout.up]
    is_met = (may_be_met & is_nan).to(torch.int64)
    return torch.zeros_like(layout.root_rows).index_add_(0, layout.row_requests, is_met) > 0
