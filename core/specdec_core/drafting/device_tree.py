"""Grows chains and trees of a fixed shape on a GPU, without waiting for it."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch.nn.functional import pad

from specdec_core.config.token_tree import TokenTree
from specdec_core.contracts.draft import DEAD, Draft
from specdec_core.contracts.proposer import ProposerBatch
from specdec_core.drafting.distributions import Distributions, draw_children, most_likely_of
from specdec_core.drafting.level import Level
from specdec_core.ops.upload import upload


@frozen(eq=False)
class _Places:
    """The draft tokens (nodes) of one depth in a tree's shape, on a device. A number is an index into all nodes; a
    place one among those of a depth.

    first: the number of the first node.
    inner: int64 [num_inner], places at the depth above of nodes that have children. most: the most of one of them.
    keys: int64 [num_inner], the numbers of their first children. No two draws that are used have the same key.
    parents: int64 [width], the parent's place. chosen: int64 [width], the parent's index in `inner` times `most`, plus
        the node's rank among its siblings.
    ancestors: int64 [width, depth], numbers of the nodes on the path, its own last.
    """

    first: int
    inner: torch.Tensor
    most: int
    keys: torch.Tensor
    parents: torch.Tensor
    chosen: torch.Tensor
    ancestors: torch.Tensor

    @property
    def width(self) -> int:
        return len(self.parents)


@lru_cache(maxsize=64)
def _places_of(shape: TokenTree, device: torch.device) -> list[_Places]:
    """Of each depth. They are made once for a shape, since it is the same in every step."""
    numbers = {path: number for number, path in enumerate(shape.paths)}
    found: list[_Places] = []
    above: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.depth + 1):
        paths = [path for path in shape.paths if len(path) == depth]
        parents = [above.index(path[:-1]) for path in paths]
        inner = sorted(set(parents))
        most = 1 + max(path[-1] for path in paths)
        chosen = [inner.index(parent) * most + path[-1] for parent, path in zip(parents, paths, strict=True)]
        found.append(
            _Places(
                first=numbers[paths[0]],
                inner=_on(device, inner),
                most=most,
                keys=_on(device, [numbers[(*above[place], 0)] for place in inner]),
                parents=_on(device, parents),
                chosen=_on(device, chosen),
                ancestors=_on(device, [[numbers[path[: i + 1]] for i in range(depth)] for path in paths]),
            )
        )
        above = paths
    return found


def _on(device: torch.device, values: list[Any]) -> torch.Tensor:
    return upload(np.array(values, dtype=np.int64), device)


class DeviceTree:
    """Grows a tree of the same shape for every request, which may be a chain. No shape of a tensor depends on a token:
    tokens that a request does not get are dead (padding) wherever they are in a level, and `batch.levels` is not asked.

    min_prob: as for `grower_of`.
    """

    def __init__(self, batch: ProposerBatch, shape: TokenTree, distributions: Distributions, min_prob: float) -> None:
        self._batch, self._distributions, self._min_prob = batch, distributions, min_prob
        self._most_likely = most_likely_of(batch)
        device = batch.root_token_ids.device
        self._counts = np.minimum(batch.max_draft_tokens, len(shape.paths))  # [batch]   nodes of each request
        self._shape = shape = shape if shape.order else shape.first(int(self._counts.max()))
        self._places = _places_of(self._shape, device)
        self._size, self._host_requests = len(self._counts), np.arange(len(self._counts))
        has_node = np.array(shape.ranks) < self._counts[:, None]
        above = np.array(shape.parents)
        self._parents = np.where(above < 0, above, has_node.cumsum(1)[:, above] - 1)  # [batch, num_nodes]   of those
        self._has_node = upload(has_node, device)  # bool [batch, num_nodes]
        self._nodes = upload(np.flatnonzero(has_node), device)
        self._requests = upload(self._host_requests, device)
        self._goes_on = torch.ones_like(self._requests, dtype=torch.bool).unsqueeze(1)  # [batch, width of the level]
        self._reach = torch.ones_like(self._requests, dtype=torch.float32)  # probability of each request's chain
        self._levels: list[tuple[torch.Tensor, ...]] = []  # of each: is_alive, token_ids, scores, q_rows [batch, width]

    def grow(self, logits: torch.Tensor) -> Level | None:
        at = self._places[len(self._levels)]
        is_alive, token_ids, scores, q_rows = self._children(logits, at)
        is_alive = is_alive & self._has_node[:, at.first : at.first + at.width]
        self._levels.append((is_alive, token_ids, scores, q_rows))
        if len(self._levels) == len(self._places):
            return None
        self._goes_on = is_alive
        if self._min_prob and self._shape.is_chain:
            self._reach = self._reach * scores[:, 0]
            is_likely = (self._reach >= self._min_prob) | self._distributions.is_sampled
            self._goes_on = is_alive & is_likely.unsqueeze(1)
        width_above = self._places[len(self._levels) - 2].width if len(self._levels) > 1 else 1
        ancestors = at.ancestors.expand(self._size, *at.ancestors.shape)
        if not self._shape.is_chain:
            ancestors = torch.where(is_alive.unsqueeze(2), ancestors, at.ancestors[:, -1:])
        return Level(
            width=at.width,
            requests=self._host_requests,
            rows=(self._requests.unsqueeze(1) * width_above + at.parents).flatten(),
            token_ids=token_ids.flatten(),
            ancestors=ancestors.flatten(0, 1),
            starts=(at.first,) * self._size,
            is_chain=self._shape.is_chain,
            is_alive=is_alive.flatten(),
        )

    def _children(self, logits: torch.Tensor, at: _Places) -> tuple[torch.Tensor, ...]:
        """Choose or draw the nodes of a depth: is_alive bool, token_ids int64, scores float32 and q_rows int64, each
        [batch, width]. logits: of the depth above, [batch * its width, draft_vocab]."""
        distributions, num_inner = self._distributions, len(at.inner)
        logits = logits.view(self._size, -1, logits.shape[-1]).index_select(1, at.inner).flatten(0, 1)
        requests = self._requests.repeat_interleave(num_inner)
        most = min(at.most, logits.shape[1])
        if distributions.draws:
            probs = distributions.probs(logits, requests)  # [batch * num_inner, draft_vocab]
            columns = probs.argmax(-1, keepdim=True) if most == 1 else probs.topk(most).indices
            q, is_sampled = probs.nan_to_num(0), distributions.is_sampled[requests]
            q_rows = distributions.add(q, requests).masked_fill(~is_sampled, -1)
            drawn, is_drawn = draw_children(self._batch.random, q, requests, at.keys.repeat(self._size), most)
            columns = torch.where(is_sampled.unsqueeze(1), drawn, columns)
            exists, scores = ~is_sampled.unsqueeze(1) | is_drawn, probs.gather(1, columns)
        else:
            log_probs, columns = self._most_likely(logits, most)
            exists, scores = torch.ones_like(columns, dtype=torch.bool), log_probs.exp()
            q_rows = torch.full_like(requests, -1)
        is_sound = self._goes_on.index_select(1, at.inner).view(-1, 1) & scores[:, :1].isfinite()
        token_ids = distributions.to_target(requests.unsqueeze(1), columns)
        found = [exists & is_sound, token_ids, scores, q_rows.unsqueeze(1).expand_as(columns)]
        if most < at.most:  # the vocabulary has no more tokens
            found = [pad(each, (0, at.most - most)) for each in found]
        return tuple(each.reshape(self._size, -1)[:, at.chosen] for each in found)

    def build(self) -> Draft:
        """Return the draft for all requests of the batch, with the draft model's probabilities as `scores`."""
        levels = zip(*self._levels, strict=True)
        is_alive, token_ids, scores, q_rows = (torch.cat(each, dim=1) for each in levels)
        parents = torch.where(is_alive, upload(self._parents, is_alive.device), DEAD).to(torch.int32)
        fields = self._distributions.fields()

        def of_nodes(table: torch.Tensor) -> torch.Tensor:
            return table.flatten().index_select(0, self._nodes)

        return Draft(
            token_ids=of_nodes(token_ids),
            parents=of_nodes(parents),
            offsets=tuple(accumulate(self._counts.tolist(), initial=0)),
            max_depth=self._shape.depth,
            q_rows=None if fields["q"] is None else of_nodes(q_rows).to(torch.int32),
            scores=of_nodes(scores),
            is_chain=self._shape.is_chain,
            **fields,
        )
