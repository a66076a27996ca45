"""Checks that the engine's output with the proposer equals the target's output without speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest

from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import run_engine
from specdec_testing.conformance.situations import Situations
from specdec_testing.conformance.workload import Ask

CANCELLED = {1: 2, 4: 0, 6: 5, 8: 3}
"""{index of a request: number of steps after which it is cancelled}."""


def outputs_of(situations: Situations, situation: str) -> tuple[Sequence[Ask], list[list[int]]]:
    """Run requests in a situation such as "preempted". Returns the requests and the output token ids of each."""
    match situation:
        case "greedy":
            return situations.asks[:5], situations.greedy.outputs
        case "sampled":
            return situations.asks[5:], situations.sampled.outputs
        case "chunked":
            return situations.asks, situations.run(situations.asks, max_num_batched_tokens=18).outputs
        case "preempted":
            return situations.asks, situations.preempted.outputs
        case "cancelled":
            journal = Journal()
            run = run_engine(situations.llm(journal), situations.asks, journal, cancel_after=CANCELLED)
            return situations.asks, run.outputs
        case "cached":
            groups = "prefix", "lookahead"  # not "fill", some of whose requests may end before their first draft
            asked = chain(*(situations.target.alike[group] for group in groups), situations.asks)
            runs = [*(situations.in_turn(group, "prefix") for group in groups), situations.cached_and_preempted]
            return [*asked], [*chain(*(run.outputs for run in runs))]
        case "late":
            return situations.asks, situations.late.outputs
    raise AssertionError(situation)


class OutputChecks:
    @pytest.mark.parametrize("situation", ["greedy", "sampled", "chunked", "preempted", "cancelled", "cached", "late"])
    def test_output_is_the_targets(self, specdec_situations: Situations, situation: str) -> None:
        """The output with the proposer equals the target's output without speculative decoding, token for token.

        "greedy", "sampled": greedy and sampled requests.
        "chunked": prompts are prefilled in chunks.
        "preempted", "cancelled": some requests are preempted or cancelled.
        "cached": prefixes of prompts are in the prefix cache. `observe` begins at token `request.num_cached_tokens`.
        "late": speculation is turned off now and then. `observe` gets hidden states of several decode steps at once.

        In the kit's engine a draft token is accepted only if it equals the target's next token, so drafts cannot change
        the output. If the output differs, the proposer writes to memory that is not its own: to the target's weights,
        to KV-cache slots of other layers than its own, or to tensors that it was given.
        """
        situations = specdec_situations
        asked, outputs = outputs_of(situations, situation)
        for i, (ask, output, expected) in enumerate(zip(asked, outputs, situations.expected(asked), strict=True)):
            if situation == "cancelled" and i in CANCELLED:
                expected = expected[: len(output)]
            assert output == expected, f"prompt {ask.prompt} with {ask.params}"
