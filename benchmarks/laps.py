"""Times proposers ("peers") alternately, a few steps (a "lap") each, so that changes of machine speed affect all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from statistics import median
from typing import Any

from attrs import frozen
from proposer_peers import Peer
from streams import Replay


@frozen
class Lap:
    """Times and token counts of one proposer over a lap, which is a few consecutive steps of a batch of requests."""

    us: dict[str, float]  # microseconds per request and step, by part and in total
    num_drafts: int  # requests times steps
    num_drafted: int  # tokens
    num_accepted: int


def run(peer: Peer, requests: Sequence[Replay], most_steps: int | None = None, *, num_before: int = 0) -> Lap | None:
    """Time a proposer on a batch of requests, for at most `most_steps` steps or until a request is finished.

    most_steps: most steps to time; None: no limit.
    num_before: number of untimed steps before the timed ones. They warm the CPU caches after other proposers have run.
    Returns None if a request was finished before the first timed step.
    """
    seconds: dict[str, float] = {}
    num_steps = num_drafted = num_accepted = 0
    for step in count(-num_before):
        if num_steps == most_steps or any(request.is_over for request in requests):
            break
        drafts, parts = peer.step(requests)
        accepted = [request.verify(draft) for request, draft in zip(requests, drafts, strict=True)]
        if step >= 0:
            num_steps += 1
            num_drafted += sum(map(len, drafts))
            num_accepted += sum(accepted)
            for part, took in parts.items():
                seconds[part] = seconds.get(part, 0.0) + took
    num_drafts = num_steps * len(requests)
    if not num_drafts:
        return None
    return Lap({part: 1e6 * took / num_drafts for part, took in seconds.items()}, num_drafts, num_drafted, num_accepted)


def in_turn(peers: Sequence[Peer], laps: Iterable[Callable[[Peer], Lap | None]]) -> dict[str, list[Lap]]:
    """Call each function of `laps` with every peer (proposer). The peer that goes first changes with every function.

    laps: functions that time a few steps of the given peer. They return a Lap, or None if there were no steps to time.
    Returns {name of the peer: its Laps}. If a function returns None for one peer, the Laps that it returned for the
    other peers are left out, too. Garbage collection is disabled during the calls.
    """
    done: dict[str, list[Lap]] = {peer.name: [] for peer in peers}
    gc.collect()
    gc.disable()
    try:
        for first, lap in enumerate(laps):
            results = {peer.name: lap(peer) for peer in (*peers[first % len(peers) :], *peers[: first % len(peers)])}
            for name, result in results.items():
                if result is not None and None not in results.values():
                    done[name].append(result)
    finally:
        gc.enable()
    return done


def all_figures(done: dict[str, list[Lap]]) -> dict[str, Any]:
    """Summarize the laps of every peer (proposer), and compare each peer with the first one.

    done: {name of the peer: its Laps}.
    Returns {name of the peer: its results}, without peers that have no laps. The results of a peer are the summary of
    its laps and, unless it is the first peer, the ratio of its time to the first peer's (median over the laps).
    """
    first, laps_of_first = next(iter(done.items()), ("", []))
    found = {name: figures(laps) for name, laps in done.items() if laps}
    for name, laps in done.items():
        if laps and name != first:
            for part in ("total", "append_and_speculate"):
                pairs = zip(laps, laps_of_first, strict=True)
                ratios = [lap.us[part] / other.us[part] for lap, other in pairs if part in lap.us and part in other.us]
                if ratios:
                    found[name][f"times {first}, {part}"] = significant(median(ratios))
    return found


def figures(laps: Sequence[Lap]) -> dict[str, Any]:
    """Summarize one peer's laps: microseconds per request and step, and mean numbers of drafted and accepted tokens.

    The time is the median of the laps' mean times.
    """
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
