"""What users see: the target's own output, faster."""

from __future__ import annotations

import pytest

from specdec_core.testing.conformance.bench import Bench
from specdec_core.testing.conformance.recording import Journal
from specdec_core.testing.conformance.runs import Run, run_engine

CANCELLED = {1: 2, 4: 0, 6: 5, 8: 3}
"""Which requests are cancelled, and after how many steps."""


def run_of(bench: Bench, situation: str) -> Run:
    match situation:
        case "greedy":
            return bench.greedy
        case "sampled":
            return bench.sampled
        case "chunked":
            return bench.run(bench.asks, max_num_batched_tokens=18)
        case "preempted":
            return bench.preempted
        case "cancelled":
            journal = Journal()
            return run_engine(bench.llm(journal), bench.asks, journal, cancel_after=CANCELLED)
    raise AssertionError(situation)


class OutputChecks:
    @pytest.mark.parametrize("situation", ["greedy", "sampled", "chunked", "preempted", "cancelled"])
    def test_output_is_the_targets(self, specdec_bench: Bench, situation: str) -> None:
        """With the proposer the engine writes what it writes without, token for token: greedily and sampled, with
        prompts prefilled in chunks, when requests are preempted, and beside requests that are cancelled.

        Drafts cannot change the output. If it differs, the proposer writes where it must not: into the target's
        weights, into KV slots that are not its group's, or into tensors that it was given.
        """
        bench, run = specdec_bench, run_of(specdec_bench, situation)
        asked = bench.asks[:5] if situation == "greedy" else bench.asks[5:] if situation == "sampled" else bench.asks
        for i, (ask, output, expected) in enumerate(zip(asked, run.outputs, bench.expected(asked), strict=True)):
            if situation == "cancelled" and i in CANCELLED:
                expected = expected[: len(output)]
            assert output == expected, f"prompt {ask.prompt} with {ask.params}"
