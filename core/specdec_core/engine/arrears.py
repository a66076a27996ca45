"""Stores the target's hidden states of requests that do not draft, until a proposer sees them (a late observation)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import define, field

from specdec_core.contracts.proposer import Observation
from specdec_core.engine.request import Request


@define
class _Kept:
    """The stored tokens and hidden states of one request, which its proposer has not seen yet. They begin at position
    `start` and have no gap."""

    request: Request
    start: int
    next_token_id: torch.Tensor  # int64 [1]   the token after the last one
    num_tokens: int = 0
    token_ids: list[torch.Tensor] = field(factory=list)
    features: dict[str, list[torch.Tensor]] = field(factory=dict)


class Arrears:
    """Stores token ids and hidden states per request, until the proposer sees them in a late observation."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self.num_tokens = 0  # of all requests

    def __contains__(self, request: Request) -> bool:
        return request.id in self._kept

    def keep(self, requests: Sequence[Request | None], observation: Observation) -> None:
        """Store the tokens and hidden states of an observation, request by request.

        requests: [batch], the observation's requests in order. None in place of a request whose tokens are not to be
            stored.
        """
        starts = zip(requests, observation.starts, observation.offsets, observation.host_num_valid, strict=False)
        for i, (request, start, offset, num_valid) in enumerate(starts):
            if request is None or not num_valid:
                continue
            following = observation.next_token_ids[i : i + 1]
            kept = self._kept.setdefault(request.id, _Kept(request, start, following))
            kept.next_token_id = following
            rows = slice(offset, offset + num_valid)
            kept.token_ids.append(observation.token_ids[rows].clone())
            for tap, features in observation.features.items():
                # A copy, since a slice would keep the tensors of all requests alive.
                kept.features.setdefault(tap, []).append(features[rows].clone())
            kept.num_tokens += num_valid
            self.num_tokens += num_valid

    def take(self, requests: Sequence[Request]) -> Observation | None:
        """Remove the stored tokens and hidden states of these requests and return them as one observation; None if
        nothing is stored."""
        taken = [kept for request in requests if (kept := self.drop(request)) is not None]
        if not taken:
            return None
        counts = [kept.num_tokens for kept in taken]
        offsets = tuple(accumulate(counts, initial=0))
        token_ids = torch.cat([part for kept in taken for part in kept.token_ids])
        positions = np.concatenate([kept.start + np.arange(kept.num_tokens) for kept in taken])
        device = token_ids.device
        return Observation(
            requests=tuple(kept.request for kept in taken),
            starts=tuple(kept.start for kept in taken),
            offsets=offsets,
            num_valid=torch.tensor(counts, dtype=torch.int32, device=device),
            last_rows=torch.tensor(offsets[1:], device=device) - 1,
            host_num_valid=tuple(counts),
            token_ids=token_ids,
            positions=torch.from_numpy(positions).to(device),
            features={
                tap: torch.cat([part for kept in taken for part in kept.features[tap]]) for tap in taken[0].features
            },
            next_token_ids=torch.cat([kept.next_token_id for kept in taken]),
        )

    def drop(self, request: Request) -> _Kept | None:
        """Remove and return the stored tokens and hidden states of a request; None if nothing is stored."""
        kept = self._kept.pop(request.id, None)
        self.num_tokens -= kept.num_tokens if kept is not None else 0
        return kept

    def largest(self) -> Request:
        """The request with the most stored tokens."""
        return max(self._kept.values(), key=lambda kept: kept.num_tokens).request
