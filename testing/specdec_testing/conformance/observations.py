"""Checks of `Proposer.observe`, which passes the target's hidden states to a proposer. The proposer gets no hidden
states of tokens that were found in the prefix cache, and may get those of other tokens late."""

from __future__ import annotations

from typing import ClassVar

import pytest

from specdec_testing.conformance.chance import difference, first_difference, skip_unless_independent
from specdec_testing.conformance.situations import Situations


def cached_difference(situations: Situations, group: str) -> str | None:
    """Compare the drafts for the same requests with and without prefix caching. Returns a text that shows the first two
    drafts that differ. None if all are equal.

    group: the name of the group of requests to run: "prefix", "fill" or "lookahead".

    Skips the test if the proposer stores no keys and values in the KV cache, if it never calls `attention.fill`, or if
    its drafts vary from run to run or with the batch.
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
        """A request gets the same drafts whether its prefix is found in the prefix cache or computed by the target.

        The target does not compute a cached prefix, so `observe` gets hidden states only from token
        `request.num_cached_tokens` on. This number may change after `reset`.

        The KV-cache slots of a cached prefix already hold the proposer's keys and values. Other requests share these
        slots, so a proposer must not write to them.

        A proposer that needs the hidden states of all tokens, such as their sum, cannot keep this rule. Name this test
        in `skips` with that reason.
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
        """The proposer calls `attention.fill(requests, num_tokens)` only for tokens whose keys and values it has
        already stored in the KV cache.

        A request may end at any moment. The next request with the same prefix then reuses the KV-cache slots of these
        tokens without computing them again.
        """
        skip_unless_cacheable(specdec_situations)
        found = cached_difference(specdec_situations, "fill")
        assert not found, (
            f"a draft is another where the beginning of the prompt was found in the cache, of a request that had ended "
            f"before it was drafted for: call attention.fill after storing, with as many tokens as are stored{found}"
        )

    def test_lookahead(self, specdec_situations: Situations) -> None:
        """`Plan.lookahead` is the number of later tokens on which the proposer's keys and values of a token depend
        (EAGLE: 1).

        Two requests share a KV-cache block of the proposer only if their tokens are equal up to the block's end and for
        `Plan.lookahead` tokens after it.
        """
        skip_unless_cacheable(specdec_situations)
        found = cached_difference(specdec_situations, "lookahead")
        assert not found, (
            f"a draft is another where a block was found that another token followed: say in Plan.lookahead on how "
            f"many tokens after its own a slot depends, such as 1 if it has the next token's embedding{found}"
        )

    def test_draft_after_late_observations(self, specdec_situations: Situations) -> None:
        """A request gets the same drafts if `observe` gets its hidden states several forward passes late.

        While speculation is turned off for a request, the engine keeps the target's hidden states. It passes them to
        `observe` in one call before the next draft. This observation may begin in the prompt and end in the output. To
        find the token of a row, use `observation.starts` (the position of each request's first row) and
        `observation.host_num_valid` (the number of its valid rows).
        """
        situations = specdec_situations
        if not situations.plan.observes:
            pytest.skip("it does not observe (Plan.observes)")
        if situations.plan.top_tokens:
            pytest.skip("a late observation has no top tokens (Plan.top_tokens)")
        if self.learns:
            pytest.skip("its drafts depend on what became of earlier ones, and there are fewer of these here")
        skip_unless_independent(situations)
        found = difference(situations, situations.late)
        assert not found, (
            f"a draft is another since the request was observed late: go by observation.starts and host_num_valid, and "
            f"not by how much the text has grown{found}"
        )
