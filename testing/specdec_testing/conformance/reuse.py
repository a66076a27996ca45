"""Runs requests in one engine repeatedly, to find what its proposer still holds of finished requests."""

from __future__ import annotations

import gc

from attrs import frozen

from specdec_core.api.llm import LLM
from specdec_testing.conformance.held_objects import HeldObjects
from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import run_engine
from specdec_testing.conformance.workload import Ask


@frozen(eq=False)
class ReuseRounds:
    """What a proposer held after each of several runs of requests. All runs use the same request ids."""

    journal: Journal
    names: list[str]  # of the requests
    strings: set[str]  # that the proposer holds after the last round
    num_views: int  # of its requests that the proposer holds
    sizes: list[int]  # after each round: see HeldObjects


def run_rounds(llm: LLM, journal: Journal, some: list[Ask], others: list[Ask], last: list[Ask]) -> ReuseRounds:
    """Run the requests `some` once and then the requests `others` twice. The i-th request has the same id in all three
    runs.

    After each of the three runs, run the request in `last` and measure what the proposer holds.
    """
    names = [f"reused-{i}" for i in range(len(some))]
    name_of = {ask.params.seed: name for asks in (some, others) for ask, name in zip(asks, names, strict=True)}
    journal.name = lambda request: name_of.get(request.seed, "last")
    sizes = []
    for asked in (some, others, others):
        run_engine(llm, asked, journal)
        ended = list(journal.views)
        run_engine(llm, last, journal)
        reach = HeldObjects.of(journal.proposer, journal.lent)
        sizes.append(reach.size)
    gc.collect()
    return ReuseRounds(journal, names, reach.strings, sum(view() is not None for view in ended), sizes)
