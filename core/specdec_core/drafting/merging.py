"""Merges several drafts of deterministic (not sampled) tokens: for proposers that combine several ways of drafting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.errors import ConfigError

LEAST_SCORE = torch.finfo(torch.float32).tiny
"""Replaces a score of 0 in the product along a path, so that the products of nodes below it still differ."""


def merge_drafts(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> Draft:
    """Make one tree for each request from the best draft tokens (nodes) of several drafts over the same batch.

    Nodes with the same path of tokens from the root become one, with the larger of their scores; dead (padding) nodes
    and their descendants are left out. For request i, the max_draft_tokens[i] nodes with the highest product of
    `scores` along their path are kept, best first; of equally good nodes, that of the earlier draft comes first, then
    the shallower one. So siblings are in the order of falling scores. A draft without scores has score 1 everywhere.
    The result has scores if any draft has.

    Raises ConfigError if a node was sampled, since a sampled token must not be dropped because of its value
    (docs/losslessness.md), if the drafts and max_draft_tokens differ in batch size, or if the drafts are on different
    devices.
    """
    _check(drafts, max_draft_tokens)
    budgets = np.array(max_draft_tokens, dtype=np.int64).clip(min=0)
    # Places are numbered over all requests: first those of the roots, then one for dead nodes, then those of all paths.
    none = len(budgets)
    places: dict[int, int] = {}  # above << 32 | token -> place
    token_ids, above, depth = ([0] * (none + 1) for _ in range(3))
    scores, joint = [1.0] * (none + 1), [1.0] * (none + 1)
    num_places = []  # after each draft
    for draft in drafts:
        requests = np.repeat(np.arange(none), draft.num_nodes_per_request)
        parents, own = draft.host_parents, [1.0] * draft.num_nodes
        ups = np.where(parents < 0, requests, parents + np.array(draft.offsets)[requests] + none + 1)
        ups[parents == DEAD] = none
        if draft.scores is not None:
            own = draft.on_host(draft.scores).tolist()
        here = list(range(none + 1))  # the places of the draft's roots and nodes
        for up, token, score in zip(ups.tolist(), draft.host_token_ids.tolist(), own, strict=True):
            up, place = here[up], none
            if up != none:
                place = places.setdefault(up << 32 | token, len(above))
                if place == len(above):
                    token_ids.append(token)
                    above.append(up)
                    depth.append(depth[up] + 1)
                    scores.append(score)
                elif not score <= scores[place]:
                    scores[place] = score
            here.append(place)
        num_places.append(len(above))

    owner = list(range(none + 1))
    for up, score in zip(above[none + 1 :], scores[none + 1 :], strict=True):
        # The engine refuses scores that are not probabilities; here they must not put a node before its parent.
        joint.append(joint[up] * min(max(LEAST_SCORE, score), 1))
        owner.append(owner[up])
    # The parent of a kept node is always kept, because it is earlier in this order: its joint score is at least as high
    # (a float times a number up to 1 never rounds up); if equal, every draft with the node also has its parent, so the
    # parent's draft is not later; and if that is the same, the parent is less deep.
    earliest = np.searchsorted(num_places, np.arange(len(above)), side="right")
    order = np.lexsort((np.array(depth), earliest, -np.array(joint), np.array(owner)))
    order = order[order > none]
    of = np.array(owner)[order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    is_kept = rank < budgets[of]
    order, rank, of = order[is_kept], rank[is_kept], of[is_kept]
    number = np.full(len(above), -1, dtype=np.int32)  # within the request
    number[order] = rank
    counts, depths = np.bincount(of, minlength=none), np.zeros(none, dtype=np.int64)
    np.maximum.at(depths, of, np.array(depth)[order])
    return Draft.from_arrays(
        np.array(token_ids)[order],
        number[np.array(above)[order]],
        counts.tolist(),
        int(depths.max(initial=0)),
        scores=None if all(d.scores is None for d in drafts) else np.array(scores, dtype=np.float32)[order],
        is_chain=bool((counts == depths).all()),
        device=drafts[0].token_ids.device,
    )


def _check(drafts: Sequence[Draft], max_draft_tokens: Sequence[int]) -> None:
    if not drafts:
        raise ConfigError("there are no drafts to merge: give one or more")
    sizes, devices = [draft.batch_size for draft in drafts], [draft.token_ids.device for draft in drafts]
    if {*sizes} != {len(max_draft_tokens)}:
        raise ConfigError(
            f"drafts for {', '.join(map(str, sizes))} requests do not merge under {len(max_draft_tokens)} budgets: "
            f"give drafts over one batch, with empty trees where there is no guess, and one budget for each request"
        )
    if len({*devices}) > 1:
        raise ConfigError(f"drafts on {', '.join(map(str, devices))} do not merge: make them on one device")
    for i, draft in enumerate(drafts):
        if draft.q_rows is not None and bool((draft.q_rows >= 0).any()):
            raise ConfigError(
                f"drafts[{i}] has sampled nodes, which do not merge: to drop one, or to unite it with its twin, bends "
                f"the distribution that is verified (rule 3 in docs/losslessness.md). Merge chosen nodes alone"
            )
