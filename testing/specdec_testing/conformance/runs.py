"""Runs requests in an engine and records the calls of its proposer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, evolve, field

from specdec_core.api.llm import LLM
from specdec_core.engine.request import Piece, Request
from specdec_core.plugins import Plugins, PluginWarning
from specdec_testing.conformance.faults import faults_of
from specdec_testing.conformance.recording import Asked, Journal, Proposal
from specdec_testing.conformance.workload import BLOCK_SIZE, Ask

P = TypeVar("P", bound=Plugins)
SMALL_POOL = {"num_kv_blocks": 24, "max_model_len": 64}
"""Settings of an engine whose KV blocks are too few for all requests at once."""


@define(eq=False)
class Run:
    """The result of running some requests.

    journal: the recorded calls of the proposer.
    outputs: the output token ids of each request, in the order in which the requests were added.
    """

    journal: Journal
    outputs: list[list[int]] = field(factory=list)
    num_preempted: int = 0
    num_cached: int = 0  # tokens that were found in the cache

    def drafts(self, *, only_after_reset: bool = False) -> dict[Asked, Any]:
        """Return the recorded drafts, {state of a request: (its draft tree, whether each node was sampled)}. Drafts
        that break a rule are left out.

        only_after_reset: whether to return only drafts for requests that had been preempted.
        """
        return {
            asked: (tree, is_sampled)
            for proposal in self.journal.proposals
            if not any(faults_of(proposal))
            for asked, after_reset, tree, is_sampled in _trees(proposal)
            if after_reset or not only_after_reset
        }


def _trees(proposal: Proposal) -> list[tuple[Asked, bool, Any, Any]]:
    draft, found = proposal.draft, []
    for i, asked in enumerate(proposal.asked):
        nodes = slice(draft.offsets[i], draft.offsets[i + 1])
        is_sampled = [False] * draft.num_nodes if draft.q_rows is None else (draft.q_rows >= 0).tolist()
        found.append((asked, proposal.after_reset[i], draft.tree(i), is_sampled[nodes]))
    return found


def quietly(load: Callable[[], P]) -> P:
    """Call `load`, which loads plugins, and suppress warnings about plugins that cannot be loaded. If the plugin under
    test is one of them, test_is_offered fails with the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return load()


def make_llm(folder: Path, plugins: Plugins, speculative_config: Mapping[str, Any] | None, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 512,
        "skip_tokenizer_init": True,
    }
    return LLM(folder, plugins=plugins, speculative_config=speculative_config, **defaults | settings)


def run_engine(
    llm: LLM,
    asked: Sequence[Ask],
    journal: Journal,
    *,
    cancel_after: Mapping[int, int] | None = None,
    cancel_preempted: bool = False,
) -> Run:
    """Run requests in an engine to their end and return their outputs.

    journal: where the calls of the engine's proposer are recorded.
    cancel_after: {index of a request: number of steps after which it is cancelled}.
    cancel_preempted: whether to cancel each request that was preempted.
    """
    run = Run(journal)
    engine = llm.engine
    ended: dict[str, list[int]] = {}

    def keep(request: Request, pieces: Sequence[Piece]) -> None:
        if request.finish_reason is not None:
            ended[request.id] = request.output_token_ids

    reads_prediction = any(drafter.plan.reads_prediction for drafter in engine._speculation.drafters)
    ids = [
        engine.add_request(
            ask.prompt, evolve(ask.params, prediction=ask.prompt) if reads_prediction else ask.params, keep
        )
        for ask in asked
    ]
    num_steps = 0
    while engine.has_unfinished:
        for index, after in (cancel_after or {}).items():
            if num_steps == after:
                engine.cancel(ids[index])
        report = engine.step()
        run.num_preempted += report.num_preempted
        run.num_cached += report.num_cached_tokens
        for request_id in journal.reset if cancel_preempted else ():
            engine.cancel(request_id)
        num_steps += 1
        assert num_steps < 500, "the engine makes no progress"
    engine.kv.check_integrity()
    run.outputs = [ended[request_id] for request_id in ids]
    return run
