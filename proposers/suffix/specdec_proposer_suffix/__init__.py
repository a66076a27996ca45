"""Suffix decoding as a specdec plugin: the method `suffix` drafts what most often followed the same context before.

The entry point names this module, so it imports nothing heavy: `build` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_suffix.config import SuffixConfig

__all__ = ["SuffixConfig", "specdec_proposers"]


def plan(config: SuffixConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    return Plan(observes=False)


def build(config: SuffixConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_suffix.proposer import SuffixProposer

    return SuffixProposer(config, context)


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    return [ProposerSpec(name="suffix", config=SuffixConfig, build=build, api=1, plan=plan, requires=("numba",))]
