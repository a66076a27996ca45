"""The likeliest path of a draft tree, for engines that verify chains only."""

from __future__ import annotations

from itertools import pairwise

from specdec_core.contracts.draft import DEAD, Draft


def likeliest_paths(draft: Draft) -> list[list[int]]:
    """Return the token ids of one path of each request's tree, from a child of the root on: the one on which most
    tokens are expected to be accepted. With `scores` this is the sum over the path's nodes of the product of scores up
    to the node; without scores, the length. Of equal paths the first counts. Dead nodes are left out."""
    if draft.is_chain and (draft.host_parents != DEAD).all():
        token_ids = draft.host_token_ids.tolist()
        return [token_ids[first:end] for first, end in pairwise(draft.offsets)]
    scores = [1.0] * draft.num_nodes if draft.scores is None else draft.on_host(draft.scores).tolist()
    paths = []
    for request, first in enumerate(draft.offsets[:-1]):
        token_ids, parents = draft.tree(request)
        best, most = -1, 0.0
        reached: dict[int, tuple[float, float]] = {-1: (1.0, 0.0)}  # node: its chance, accepted nodes down to it
        for node, parent in enumerate(parents):
            if parent == DEAD or parent not in reached:
                continue
            prob, expected = reached[parent]
            prob *= scores[first + node]
            reached[node] = prob, expected + prob
            if reached[node][1] > most:
                best, most = node, reached[node][1]
        path = []
        while best >= 0:
            path.append(token_ids[best])
            best = parents[best]
        paths.append(path[::-1])
    return paths
