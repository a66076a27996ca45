"""The common interface (`Peer`) of the proposers that proposers.py compares, and specdec's proposers wrapped in it.

`Peer.step` passes the new tokens of some requests to the proposer, lets the proposer draft once for each request, and
returns the drafts and {phase of the step: seconds}. Only calls that an engine would make are timed. Data that an engine
would hold in any case, such as the requests' token ids, is prepared before timing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from measuring import version_of
from streams import Replay

from specdec_core import BuildContext, TargetInfo
from specdec_testing.drive import batch_of

Drafts = list[list[int]]
Seconds = dict[str, float]
CPU = torch.device("cpu")
TARGET = TargetInfo("none", "none", 8192, 64, 2, 2**20, torch.float32, CPU)


class Peer:
    """Interface of a proposer in the comparison.

    name: its name in the results.
    distribution: the installed distribution whose version the results record.
    settings: its options, which the results record, too.
    """

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
        """Let the proposer cache the whole output of a request, and return how many seconds this took.

        request: holds the prompt and the output. Nothing is drafted for it.
        """
        started = perf_counter()
        self.start(request)
        request.advance(len(request.text) - request.num_tokens)
        self.finish(request)
        return perf_counter() - started

    def cached_bytes(self) -> int | None:
        """Return the size in bytes that the proposer reports for its cache of outputs; None if it reports no size."""
        return None


class Ours(Peer):
    """A specdec proposer. The timed part of a step is one call of `propose`, which includes creating the `Draft`.

    method: the proposer's name, such as `ngram`.
    max_nodes: maximum number of draft tokens per request and step.
    """

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
    """specdec's proposer `suffix`. Three phases of a step are timed separately.

    The first phase prepares the arguments. The second one appends tokens and drafts, like arctic-inference's two calls.
    The third one creates the `Draft`.
    """

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


def make_peers(makers: Iterable[Callable[[], Peer]], say: Callable[[str], None] = lambda _: None) -> list[Peer]:
    """Create the peers (proposers to compare) whose libraries are installed.

    makers: functions that create one peer each.
    say: called with a message for each peer whose library is not installed.
    """
    peers = []
    for make in makers:
        try:
            peers.append(make())
        except ImportError as error:
            say(f"left out: {error}")
    return peers


def about(peers: Iterable[Peer]) -> dict[str, Any]:
    return {peer.name: {"version": version_of(peer.distribution), "settings": peer.settings} for peer in peers}
