"""Predicted outputs as a specdec plugin: the method `prediction` drafts from the text that a request expects
(`SamplingParams.prediction`), such as the file that it edits.

The engine imports this module to list plugins. So only `build` imports numpy and the proposer.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl, option
from specdec_core.config.fields import whole_number

DEFAULT_NUM_TOKENS = 16
"""Draft tokens in a step where users give no number. Most are accepted while the output follows the prediction."""


@frozen
class PredictionConfig:
    """Options of the method `prediction`. Raises ConfigError if prediction_max_branches is below 1."""

    prediction_max_branches: int = option(
        whole_number(1),
        "Places in the prediction that a draft continues at once, as branches of a tree, where the output has left it.",
        default=3,
    )


def plan(config: PredictionConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    return Plan(observes=False, reads_prediction=True)


def build(config: PredictionConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_prediction.proposer import PredictionProposer

    return PredictionProposer(config, context.device)


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    return [
        ProposerSpec(
            name="prediction",
            config=PredictionConfig,
            build=build,
            api=1,
            plan=plan,
            num_speculative_tokens=lambda config, device: DEFAULT_NUM_TOKENS,
        )
    ]
