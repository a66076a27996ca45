"""What users see: the target's own output, faster."""

from __future__ import annotations

import pytest

from specdec_testing.conformance.recording import Journal
from specdec_testing.conformance.runs import Run, run_engine
from specdec_testing.conformance.situations import Situations

CANCELLED = {1: 2, 4: 0, 6: 5, 8: 3}
"""Which requests are cancelled, and after how many steps."""


def run_of(situations: Situations, situation: str) -> Run:
    match situation:
        case "greedy":
            return situations.greedy
        case "sampled":
            return situations.sampled
        case "chunked":
            return situations.run(situations.asks, max_num_batched_tokens=18)
        case "preempted":
            return situations.preempted
        case "cancelled":
            journal = Journal()
            return run_engine(situations.llm(journal), situations.asks, journal, cancel_after=CANCELLED)
    raise AssertionError(situation)


class OutputChecks:
    @pytest.mark.parametrize("situation", ["greedy", "sampled", "chunked", "preempted", "cancelled"])
    def test_output_is_the_targets(self, specdec_situations: Situations, situation: str) -> None:
        """With the proposer the engine writes what it writes without, token for token: greedily and sampled, with
        prompts prefilled in chunks, when requests are preempted, and beside requests that are cancelled.

        Drafts cannot change the output. If it differs, the proposer writes where it must not: into the target's
        weights, into KV slots that are not its group's, or into tensors that it was given.
        """
        situations, run = specdec_situations, run_of(specdec_situations, situation)
        asked = (
            situations.asks[:5]
            if situation == "greedy"
            else situations.asks[5:]
            if situation == "sampled"
            else situations.asks
        )
        for i, (ask, output, expected) in enumerate(zip(asked, run.outputs, situations.expected(asked), strict=True)):
            if situation == "cancelled" and i in CANCELLED:
                expected = expected[: len(output)]
            assert output == expected, f"prompt {ask.prompt} with {ask.params}"
