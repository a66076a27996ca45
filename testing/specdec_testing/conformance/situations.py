"""Runs one proposer in real engines, in situations such as preemption. Each run is made when a test first needs it, and
then cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from specdec_core.api.llm import LLM
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.contracts.proposer import BuildContext, Plan, Proposer, ProposerSpec
from specdec_core.errors import PluginError
from specdec_core.plugins import Plugins
from specdec_testing.conformance import beginnings, workload
from specdec_testing.conformance.recording import Journal, Proposal, RecordingPlugins
from specdec_testing.conformance.reuse import ReuseRounds, run_rounds
from specdec_testing.conformance.runs import SMALL_POOL, Run, make_llm, quietly, run_engine
from specdec_testing.conformance.subject import Subject
from specdec_testing.conformance.targets import Target
from specdec_testing.conformance.workload import Ask


class Situations:
    """Engine runs with one proposer, which the tests of one conformance class share. A test that needs the proposer is
    skipped if the proposer cannot be loaded."""

    def __init__(self, subject: Subject, target: Target, folder: Path) -> None:
        self.subject = subject
        self.target = target
        self._folder = folder
        self._in_turn: dict[tuple[str, str], Run] = {}
        self._journals: list[Journal] = []
        self.histories: list[Proposal] | None = None  # drafts made outside of an engine, once a test needs them

    @cached_property
    def plugins(self) -> RecordingPlugins:
        plugins = quietly(lambda: RecordingPlugins.load(modules=self.subject.modules))
        plugins.recorded = self.subject.method
        return plugins

    @cached_property
    def spec(self) -> ProposerSpec:
        try:
            return Plugins.proposer(self.plugins, self.subject.method)
        except PluginError as error:
            pytest.skip(f"it cannot be loaded: {error}")

    @cached_property
    def options(self) -> dict[str, Any]:
        return dict(self.subject.make_options(self.target.folder, self._folder))

    @cached_property
    def speculative_config(self) -> dict[str, Any]:
        # Under rule 1 alone the output is plain decoding's whatever q says, so that it can be compared token by token.
        own = {
            "method": self.spec.name,
            "num_speculative_tokens": self.subject.num_speculative_tokens,
            "verifier": "chosen",
        }
        return own | self.options

    @cached_property
    def config(self) -> Any:
        """The method's options, as an instance of the method's config class (`ProposerSpec.config`)."""
        return SpeculativeConfig.from_mapping(self.speculative_config, self.spec.config).options

    @cached_property
    def asks(self) -> list[Ask]:
        """The requests of most runs: five greedy ones, then five sampled ones."""
        most = self.subject.num_speculative_tokens
        return [*workload.asks(0.0, 100, most), *workload.asks(0.8, 200, most)]

    def run(self, asked: Sequence[Ask], **settings: Any) -> Run:
        """Run requests in a new engine, hence with a new proposer. settings: keyword arguments of the engine
        (`LLM`)."""
        journal = Journal()
        return run_engine(self.llm(journal, **settings), asked, journal)

    def llm(self, journal: Journal, **settings: Any) -> LLM:
        config = self.speculative_config
        self.plugins.journal = journal
        self._journals.append(journal)
        return make_llm(self.target.folder, self.plugins, config, **settings)

    def expected(self, asked: Sequence[Ask]) -> list[list[int]]:
        return [self.target.outputs[workload.plain(ask)] for ask in asked]

    @cached_property
    def greedy(self) -> Run:
        return self.run(self.asks[:5])

    @cached_property
    def sampled(self) -> Run:
        return self.run(self.asks[5:])

    @cached_property
    def sampled_again(self) -> Run:
        return self.run(self.asks[5:])

    @cached_property
    def rearranged(self) -> Run:
        """A run of one request alone, and then of all requests in one batch in reverse order. Only its drafts are
        recorded, not its outputs."""
        journal = Journal()
        llm = self.llm(journal)
        for asked in ([self.asks[8]], self.asks[::-1]):
            run_engine(llm, asked, journal)
        return Run(journal)

    @cached_property
    def preempted(self) -> Run:
        run = self.run(self.asks, **SMALL_POOL)
        assert run.num_preempted > 0, "the kit's own fault: nothing was preempted"
        return run

    def in_turn(self, group: str, kv_manager: str) -> Run:
        """Run requests that begin with the same tokens, one after another in one engine. The run is cached.

        group: the name of the group of requests to run: "prefix", "fill" or "lookahead".
        kv_manager: "prefix" for prefix caching, "paged" for none.
        """
        if (group, kv_manager) not in self._in_turn:
            journal = Journal()
            llm = self.llm(journal, kv_manager=kv_manager)
            run = beginnings.run_in_turn(llm, self.target.alike[group], journal)
            # How much is cached depends on the KV that the proposer reports with `fill`.
            assert run.num_cached or kv_manager != "prefix" or self.plan.kv_layout, (
                "the kit's own fault: nothing was found in the cache"
            )
            self._in_turn[group, kv_manager] = run
        return self._in_turn[group, kv_manager]

    @cached_property
    def cached_and_preempted(self) -> Run:
        """A run of all requests with prefix caching and so few KV-cache blocks that some requests are preempted. A
        preempted request may find its own blocks in the prefix cache when it starts over."""
        run = self.run(self.asks, kv_manager="prefix", **SMALL_POOL)
        assert run.num_preempted > 0, "the kit's own fault: nothing was preempted"
        assert run.num_cached or self.plan.kv_layout, "the kit's own fault: nothing was found in the cache"
        return run

    @cached_property
    def late(self) -> Run:
        """A run of all requests in which speculation is turned off for each request now and then, so that the proposer
        gets the request's hidden states late."""
        journal = Journal()
        llm = self.llm(journal)
        for drafter in llm.engine._speculation.drafters:
            drafter.observer.is_off = workload.off_now_and_then
        run = run_engine(llm, self.asks, journal)
        assert journal.num_late or not self.plan.observes, "the kit's own fault: nothing was observed late"
        return run

    @cached_property
    def rounds(self) -> ReuseRounds:
        journal = Journal()
        return run_rounds(self.llm(journal), journal, self.asks[:3], self.asks[5:8], workload.last())

    @cached_property
    def many_seeds(self) -> Run:
        return self.run(workload.many_seeds())

    @cached_property
    def proposals(self) -> list[Proposal]:
        return [proposal for run in (self.greedy, self.sampled) for proposal in run.journal.proposals]

    @property
    def costs(self) -> str:
        """The median time of the proposer's calls in all runs so far. "" before the first run."""
        calls = {
            call: [seconds for journal in self._journals for seconds in journal.seconds[call]]
            for call in ("propose", "observe")
        }
        found = [f"{call} {median(each) * 1e6:.0f} us ({len(each)} calls)" for call, each in calls.items() if each]
        return f"{self.subject.method}: {', '.join(found)}" if found else ""

    @property
    def context(self) -> BuildContext:
        context: BuildContext = self.greedy.journal.context
        return context

    @cached_property
    def plan(self) -> Plan:
        return self.spec.plan(self.config, self.context.target, self.subject.num_speculative_tokens)

    @cached_property
    def is_model_free(self) -> bool:
        """Whether the proposer drafts from token ids alone, so that it can be tested with arbitrary token sequences."""
        plan = self.plan
        return not (plan.taps or plan.output_rows or plan.kv_layout or plan.scratch_slots)

    @cached_property
    def lone_proposer(self) -> Proposer:
        """A further instance of the proposer, which the kit calls directly instead of through an engine."""
        return self.spec.build(self.config, self.context)
