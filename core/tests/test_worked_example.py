"""The worked example of speculative sampling, in numbers: three draft tokens, two of which the target finds likelier
than the draft model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource
from specdec_core.ops.residuals import Residuals
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_testing.enumerating import enumerate_outcomes

TARGET_PROBS = (0.85, 0.75, 0.15)  # of the draft tokens
DRAFT_PROBS = (0.60, 0.55, 0.70)
TOKENS, OTHER, NEXT = (0, 1, 2), 3, 4  # the rest of each distribution is on one other token; then comes NEXT


def outcomes(residuals: Any) -> dict[tuple[int, ...], float]:
    """{emitted tokens: probability} for the three draft tokens."""
    target, draft_probs = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    for i, token in enumerate(TOKENS):
        target[i, token], target[i, OTHER] = TARGET_PROBS[i], 1 - TARGET_PROBS[i]
        draft_probs[i, token], draft_probs[i, OTHER] = DRAFT_PROBS[i], 1 - DRAFT_PROBS[i]
    target[3, NEXT] = 1
    draft = evolve(
        Draft.from_chains([list(TOKENS)]), q=draft_probs, q_rows=torch.arange(3, dtype=torch.int32), is_chain=True
    )

    def step(random: RandomSource) -> tuple[int, ...]:
        verdict = RejectionVerifier(residuals).verify(target.log(), draft, random)
        return tuple(verdict.token_ids[0, : int(verdict.num_accepted[0]) + 1].tolist())

    found: dict[tuple[int, ...], float] = {}
    for probability, tokens in enumerate_outcomes(step):
        found[tokens] = found.get(tokens, 0.0) + probability
    return found


def check(residuals: Any = Residuals) -> None:
    """Tokens that the target finds at least as likely are accepted. The third is accepted with probability 0.15 / 0.70;
    after its rejection the other token follows, the only one of which the target finds more likely than the draft."""
    expected = {(0, 1, OTHER): 1 - 0.15 / 0.70, (0, 1, 2, NEXT): 0.15 / 0.70}
    assert outcomes(residuals) == pytest.approx(expected)


def test_the_example() -> None:
    check()


class WithoutSubtraction(Residuals):
    def _rest(self, nodes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self._left[self._proposals.parent_rows[nodes]]


def test_a_token_after_a_rejection_that_is_drawn_from_the_target_alone_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check(WithoutSubtraction)
