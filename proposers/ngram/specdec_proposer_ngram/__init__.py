"""Prompt lookup as a specdec plugin: the method `ngram` drafts the tokens that followed the same n-gram earlier.

The engine imports this module to list plugins. So only `build` imports numba and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_ngram.config import DEFAULT_NUM_TOKENS, NgramConfig

__all__ = ["NgramConfig", "specdec_proposers"]


def plan(config: NgramConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    return Plan(observes=False)


def build(config: NgramConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_ngram.proposer import NgramProposer

    return NgramProposer(config, context.max_num_seqs, context.device)


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    return [
        ProposerSpec(
            name="ngram",
            config=NgramConfig,
            build=build,
            api=1,
            plan=plan,
            requires=("numba",),
            num_speculative_tokens=lambda config, device: DEFAULT_NUM_TOKENS,
        )
    ]
