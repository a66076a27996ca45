"""Suffix decoding as a specdec plugin: the method `suffix` drafts the tokens that most often followed the same context.

The engine imports this module to list plugins. So only `build` imports numba and other heavy packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_core import BuildContext, Plan, Proposer, ProposerSpec, TargetInfo, hookimpl
from specdec_proposer_suffix.config import SuffixConfig

if TYPE_CHECKING:
    import click

__all__ = ["SuffixConfig", "specdec_commands", "specdec_proposers"]


def plan(config: SuffixConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    return Plan(observes=False)


def build(config: SuffixConfig, context: BuildContext) -> Proposer:
    from specdec_proposer_suffix.proposer import SuffixProposer
    from specdec_proposer_suffix.rehearsal import rehearse

    rehearse(config, context)
    return SuffixProposer(config, context)


@hookimpl
def specdec_proposers() -> Sequence[ProposerSpec]:
    spec = ProposerSpec(
        name="suffix",
        config=SuffixConfig,
        build=build,
        api=1,
        plan=plan,
        requires=("numba",),
        num_speculative_tokens=lambda config, device: config.suffix_decoding_max_tree_depth,
    )
    return [spec]


@hookimpl
def specdec_commands() -> Sequence[click.Command]:
    from specdec_proposer_suffix.commands import suffix

    return [suffix]
