"""What a proposer never sees, because it was found in the cache, and what it sees late."""

from __future__ import annotations

from typing import ClassVar

import pytest

from specdec_testing.conformance.chance import difference, first_difference, skip_unless_independent
from specdec_testing.conformance.situations import Situations


def cached_difference(situations: Situations, group: str) -> str | None:
    """The first draft that is another with prefix caching than without, in a group of `beginnings`.

    The test is skipped if nothing of the proposer's can be found again.
    """
    if situations.plan.kv_layout is None:
        pytest.skip("it has no KV of its own (Plan.kv_layout) that could be found again")
    skip_unless_independent(situations)
    cached = situations.in_turn(group, "prefix")  # first: "paged" could leave the right values in memory that it frees
    if not cached.journal.num_fills:
        pytest.skip("it never calls attention.fill, so that nothing of its KV is found again")
    return first_difference(situations.in_turn(group, "paged").drafts(), cached.drafts())


def skip_unless_cacheable(situations: Situations) -> None:
    if cached_difference(situations, "prefix"):
        pytest.skip("its drafts are others after any cached prefix: see test_draft_after_cached_prefix")


class ObservationChecks:
    learns: ClassVar[bool]

    def test_draft_after_cached_prefix(self, specdec_situations: Situations) -> None:
        """A request whose beginning was found in the cache is drafted for as if all of it had been computed.

        Observing begins at `request.num_cached_tokens`: what lies before it has no features and is not observed. The
        slots of the draft's own KV below it are filled already, and other requests read them, too. The number may be
        another after `reset`. A proposer that goes by features of the whole text besides, such as a sum of them, cannot
        keep this: skip the test and say so.
        """
        found = cached_difference(specdec_situations, "prefix")
        if not found and not self.learns:
            found = difference(specdec_situations, specdec_situations.cached_and_preempted, only_after_reset=True)
        assert not found, (
            f"a draft is another where the beginning of the prompt was found in the cache: count from "
            f"request.num_cached_tokens, whose slots are there, and write to none before it{found}"
        )
        assert specdec_situations.in_turn("prefix", "prefix").num_cached, (
            "it calls attention.fill, and yet nothing of a prompt was found again: give the number of all tokens, from "
            "the request's first one on, whose keys and values are stored"
        )

    def test_fill(self, specdec_situations: Situations) -> None:
        """`attention.fill(requests, num_tokens)` claims no more than was stored by then.

        A request may end, or be cancelled, at any moment. What was claimed of it is found by the next one with the same
        beginning, and is not computed again.
        """
        skip_unless_cacheable(specdec_situations)
        found = cached_difference(specdec_situations, "fill")
        assert not found, (
            f"a draft is another where the beginning of the prompt was found in the cache, of a request that had ended "
            f"before it was drafted for: call attention.fill after storing, with as many tokens as are stored{found}"
        )

    def test_lookahead(self, specdec_situations: Situations) -> None:
        """`Plan.lookahead` says how many tokens after its own a slot of the draft's KV depends on.

        Requests share a block if they agree up to its end, and in so many tokens after it.
        """
        skip_unless_cacheable(specdec_situations)
        found = cached_difference(specdec_situations, "lookahead")
        assert not found, (
            f"a draft is another where a block was found that another token followed: say in Plan.lookahead on how "
            f"many tokens after its own a slot depends, such as 1 if it has the next token's embedding{found}"
        )

    def test_draft_after_late_observations(self, specdec_situations: Situations) -> None:
        """A request that was observed late is drafted for as if it had been observed after every pass.

        While a request is not to draft, the engine keeps what was computed of it, and hands it over in one observation
        before the next draft. So an observation may begin at the prompt and end in the output, and have more rows than
        a draft has nodes: `observation.starts` and `host_num_valid` say which tokens they are.
        """
        situations = specdec_situations
        if not situations.plan.observes:
            pytest.skip("it does not observe (Plan.observes)")
        if self.learns:
            pytest.skip("its drafts depend on what became of earlier ones, and there are fewer of these here")
        skip_unless_independent(situations)
        found = difference(situations, situations.late)
        assert not found, (
            f"a draft is another since the request was observed late: go by observation.starts and host_num_valid, and "
            f"not by how much the text has grown{found}"
        )
