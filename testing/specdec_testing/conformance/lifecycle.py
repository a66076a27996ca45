"""Checks of what a proposer does when requests are preempted, cancelled and finished, and when it is closed
(`specdec_core.contracts.proposer.Proposer`)."""

from __future__ import annotations

from specdec_testing.conformance.chance import difference, skip_unless_independent
from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import SMALL_POOL, Run, run_engine
from specdec_testing.conformance.situations import Situations


class LifecycleChecks:
    def test_draft_after_preemption(self, specdec_situations: Situations) -> None:
        """A request gets the same drafts after a preemption as without one.

        `reset` must drop everything that the proposer stored from the request's hidden states. The target then computes
        the request's tokens again, and `observe` gets their hidden states again, from token `request.num_cached_tokens`
        on.
        """
        skip_unless_independent(specdec_situations)
        found = difference(specdec_situations, specdec_situations.preempted, only_after_reset=True)
        assert not found, f"a draft is another since the request was preempted: forget it in reset{found}"

    def test_reused_ids(self, specdec_situations: Situations) -> None:
        """A request gets the same drafts whether its id is new or was used by an earlier request that has finished.
        `finish` must drop all state of the finished request."""
        skip_unless_independent(specdec_situations)
        found = difference(specdec_situations, Run(specdec_situations.rounds.journal))
        assert not found, f"a draft is another where the id was in use before: forget it in finish{found}"

    def test_finish_at_any_moment(self, specdec_situations: Situations) -> None:
        """`finish` does not raise, whenever it is called after `start`: before the first `propose` or `observe`,
        between two prefill chunks, or after `reset`."""
        asked = specdec_situations.asks
        journal = Journal()
        llm = specdec_situations.llm(journal, max_num_batched_tokens=16, **SMALL_POOL)
        run_engine(llm, asked, journal, cancel_after={i: i for i in range(len(asked))})
        run_engine(llm, asked, journal, cancel_preempted=True)

    def test_close(self, specdec_situations: Situations) -> None:
        """`close` does not raise, neither before the first request nor while requests run. In the second case the
        engine first calls `finish` for all running requests."""
        for num_requests in (0, 3):
            journal = Journal()
            with specdec_situations.llm(journal) as llm:
                for ask in specdec_situations.asks[:num_requests]:
                    llm.engine.add_request(ask.prompt, ask.params)
                for _ in range(num_requests):
                    llm.engine.step()
            assert journal.closed == [None], (
                f"close raised {journal.closed[0]!r} after {num_requests} requests: save what there is, if anything"
            )

    def test_nothing_is_kept_after_finish(self, specdec_situations: Situations) -> None:
        """After `finish` the proposer keeps nothing of the request, since a server runs millions of requests.

        The test follows Python references from the proposer to all objects that it holds, except objects that the
        engine provides. It must find neither the id nor the request object (`RequestView`) of a finished request, and
        the number of references must not grow when the same requests run again. Before each search one more request
        runs, so a proposer may keep its last batch.
        """
        held = specdec_situations.rounds
        known = {name for name in held.names if name in held.strings}
        assert not known, f"it still knows the finished requests {sorted(known)}: forget them in finish"
        assert not held.num_views, f"it still holds {held.num_views} views of finished requests: forget them in finish"
        growth = held.sizes[-1] - held.sizes[-2]
        assert growth < len(held.names), (
            f"it holds more after each round of {len(held.names)} requests (objects and numbers: {held.sizes})"
        )

    def test_arguments_are_not_changed(self, specdec_situations: Situations) -> None:
        """`propose` and `observe` do not write to the tensors and token ids that they are given. A proposer must copy
        what it needs to change."""
        situations = specdec_situations
        changed = [line for run in (situations.greedy, situations.sampled) for line in run.journal.changed]
        assert not changed, f"{changed[0]}: copy it first"
