"""Peers at work in turn, a lap each, so that drift of the machine falls on all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any

from attrs import field, frozen
from proposer_peers import Peer
from streams import Replay


@frozen
class Lap:
    """What a peer did in some steps of a batch."""

    us: dict[str, float]  # microseconds per request and step, of each part and in total
    num_drafts: int  # requests times steps
    num_drafted: int = field(default=0)  # tokens
    num_accepted: int = field(default=0)


@contextmanager
def no_collections() -> Iterator[None]:
    """Garbage is collected between laps, not in them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(peer: Peer, requests: Sequence[Replay], most_steps: int | None = None) -> Lap | None:
    """Steps of all the requests together, until one of them is over. None if one was from the beginning."""
    seconds: dict[str, float] = {}
    num_steps = num_drafted = num_accepted = 0
    with no_collections():
        for num_steps in count():
            if num_steps == most_steps or any(request.is_over for request in requests):
                break
            drafts, parts = peer.step(requests)
            for part, took in parts.items():
                seconds[part] = seconds.get(part, 0.0) + took
            num_drafted += sum(map(len, drafts))
            num_accepted += sum(r.verify(draft) for r, draft in zip(requests, drafts, strict=True))
    num_drafts = num_steps * len(requests)
    if not num_drafts:
        return None
    return Lap({part: 1e6 * took / num_drafts for part, took in seconds.items()}, num_drafts, num_drafted, num_accepted)


def in_turn(peers: Sequence[Peer], laps: Iterable[Callable[[Peer], Lap | None]]) -> dict[str, list[Lap]]:
    """{name: its laps}: each lap run by every peer, another one first each time."""
    done: dict[str, list[Lap]] = {peer.name: [] for peer in peers}
    for first, lap in enumerate(laps):
        for peer in (*peers[first % len(peers) :], *peers[: first % len(peers)]):
            if (result := lap(peer)) is not None:
                done[peer.name].append(result)
    return done


def figures(laps: Sequence[Lap]) -> dict[str, Any]:
    """Medians over the laps of the mean time of a request's step; drafts as counted over all of them."""
    parts = laps[0].us
    totals = sorted(lap.us["total"] for lap in laps)
    num_drafts = sum(lap.num_drafts for lap in laps)
    return {
        "us_per_request_step": significant(median(totals)),
        **{f"{part}_us": significant(median(lap.us[part] for lap in laps)) for part in parts if part != "total"},
        "lowest_lap_us": significant(totals[0]),
        "highest_lap_us": significant(totals[-1]),
        "num_laps": len(laps),
        "drafted_per_step": round(sum(lap.num_drafted for lap in laps) / num_drafts, 3),
        "accepted_per_step": round(sum(lap.num_accepted for lap in laps) / num_drafts, 3),
    }


def significant(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")
