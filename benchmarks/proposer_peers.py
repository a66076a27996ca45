"""What a comparison asks of a proposer, and specdec's own. Only what an engine would call is timed.

A peer's `step` drafts once for each of some requests that have started and whose tokens it has not seen yet; it returns
the drafts and the seconds of each part. What an engine would have at hand anyway is prepared before the clock runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from measuring import installed
from streams import Replay

from specdec_core import BuildContext, TargetInfo
from specdec_testing.drive import batch_of

Drafts = list[list[int]]
Seconds = dict[str, float]
CPU = torch.device("cpu")
TARGET = TargetInfo("none", "none", 8192, 64, 2, 2**20, torch.float32, CPU)


class Peer:
    """name: in the results. distribution: whose version is recorded. settings: recorded, too."""

    name: str
    distribution: str
    settings: dict[str, Any]

    def start(self, request: Replay) -> None:
        return

    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        raise NotImplementedError

    def finish(self, request: Replay) -> None:
        return

    def cache(self, request: Replay) -> float:
        """Start and finish a request whose output is known in one piece. Returns the seconds that it took."""
        started = perf_counter()
        self.start(request)
        request.advance(len(request.text) - request.num_tokens)
        self.finish(request)
        return perf_counter() - started

    def cached_bytes(self) -> int | None:
        """What it says it holds."""
        return None


class Ours(Peer):
    """A specdec proposer: one call a step, with all that it does around its search, the Draft included."""

    def __init__(self, method: str, options: dict[str, Any], max_nodes: int, max_num_seqs: int) -> None:
        self.name, self.distribution = f"specdec {method}", f"specdec-proposer-{method}"
        self.settings = {**options, "num_speculative_tokens": max_nodes}
        self._max_nodes = max_nodes
        (spec,) = importlib.import_module(f"specdec_proposer_{method}").specdec_proposers()
        context = BuildContext(
            target=TARGET,
            num_speculative_tokens=max_nodes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=TARGET.max_model_len,
            device=CPU,
            embed=lambda _: _,
            output_head=lambda _: _,
            output_rows=lambda _: _,
            attention=None,
            load_model=lambda _: _,
            speed_up=lambda _: None,
        )
        self._proposer = spec.build(spec.config(**options), context)

    def start(self, request: Replay) -> None:
        self._proposer.start(request)

    @torch.inference_mode()
    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        batch = batch_of(requests, [self._max_nodes] * len(requests), temperature=0.0)
        started = perf_counter()
        draft = self._proposer.propose(batch)
        seconds = perf_counter() - started
        tokens, offsets = draft.token_ids.tolist(), draft.offsets
        return [tokens[offsets[i] : offsets[i + 1]] for i in range(len(requests))], {"total": seconds}

    def finish(self, request: Replay) -> None:
        self._proposer.finish(request, "length")

    def cached_bytes(self) -> int | None:
        return getattr(self._proposer, "num_bytes", None)


class OursSuffix(Ours):
    """Its step in parts: its arguments, what arctic's two calls do, and the Draft made of it."""

    @torch.inference_mode()
    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        batch = batch_of(requests, [self._max_nodes] * len(requests), temperature=0.0)
        started = perf_counter()
        plan, tails, nodes = self._proposer.plan(batch)
        planned = perf_counter()
        self._proposer.chains(plan, tails, nodes)
        found = perf_counter()
        draft = self._proposer.draft(plan, nodes, is_chain=True)
        ended = perf_counter()
        tokens, offsets = draft.token_ids.tolist(), draft.offsets
        drafts = [tokens[offsets[i] : offsets[i + 1]] for i in range(len(requests))]
        parts = {"arguments": planned - started, "append_and_speculate": found - planned, "draft": ended - found}
        return drafts, {**parts, "total": ended - started}


def made(makers: Iterable[Callable[[], Peer]], say: Callable[[str], None] = lambda _: None) -> list[Peer]:
    """New peers, without those that are not installed."""
    peers = []
    for make in makers:
        try:
            peers.append(make())
        except ImportError as error:
            say(f"left out: {error}")
    return peers


def about(peers: Iterable[Peer]) -> dict[str, Any]:
    return {peer.name: {"version": installed(peer.distribution), "settings": peer.settings} for peer in peers}
