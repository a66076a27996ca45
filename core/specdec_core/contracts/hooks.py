"""The pluggy hooks with which a plugin offers proposers, verifiers and other objects, and gets reports of steps.

A plugin is a module (or object) named by an entry point of group `specdec`, with functions marked `@hookimpl`:

    from specdec_core import ProposerSpec, hookimpl

    @hookimpl
    def specdec_proposers():
        return [ProposerSpec(name="mine", config=MyConfig, build=build, api=1)]

Hooks return objects that do the work; no hook is called while tokens are being drafted or verified. A plugin's module
must import neither torch nor anything else that is slow: such imports belong into `build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from specdec_core.contracts.grammar import GrammarSpec
from specdec_core.contracts.kv import KVManagerSpec
from specdec_core.contracts.ops import OpsSpec
from specdec_core.contracts.proposer import ProposerSpec
from specdec_core.contracts.verifier import VerifierSpec

if TYPE_CHECKING:
    import click

    from specdec_core.contracts.report import StepReport

PROJECT = "specdec"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of the same name."""


@hookspec
def specdec_proposers() -> Sequence[ProposerSpec]:
    """Offer proposers (ways of drafting tokens). Called once per plugin when plugins are loaded or listed. Each spec is
    named like an entry point of the plugin, and users write that as `method`. Any plugin may implement it."""


@hookspec
def specdec_verifiers() -> Sequence[VerifierSpec]:
    """Offer verifiers (rules that accept or reject draft tokens), as specdec-core offers its own. Called once per
    plugin, for specs whose names are the plugin's entry points'. Any plugin may implement it."""


@hookspec
def specdec_kv_managers() -> Sequence[KVManagerSpec]:
    """Offer KV managers (which store the keys and values of all requests in blocks), as specdec-core offers "paged".
    Called once per plugin, for specs whose names are the plugin's entry points'. Any plugin may implement it."""


@hookspec
def specdec_grammars() -> Sequence[GrammarSpec]:
    """Offer compilers of grammars, which constrain outputs (structured output). Called once per plugin, for specs whose
    names are the plugin's entry points'. Any plugin may implement it. A request for structured output is refused unless
    exactly one is installed and not disabled."""


@hookspec
def specdec_ops(device: str) -> OpsSpec | None:
    """Replace operations of `specdec_core.ops` by faster ones with the same signature and the same results.

    Called once when an engine is built. device: the type of device it runs on, such as "cpu" or "cuda". Return None if
    the plugin has none for that device; import heavy modules in the body. The spec's `supports` decides for which
    layers. Any plugin may implement it. It is an error if two replace one operation for the same layers.
    """


@hookspec
def specdec_commands() -> Sequence[click.Command]:
    """Add commands to the command line: `spec-decode NAME` runs the command of that name, which may be a click group.

    Called each time `spec-decode` lists its commands or plugins, or is given a name that is not one of core's commands,
    but never for an engine. Slow imports belong into the commands' bodies. Any plugin may implement it. A command is
    refused if core or another plugin has a command of its name.
    """


@hookspec
def specdec_step_finished(report: StepReport) -> None:
    """Receive a report of each finished step, for metrics and logs.

    Called after the step's tokens were emitted, by every engine that loaded the plugin. report: read only. Any plugin
    may implement it. The engine waits for it. If it raises, the step's caller gets a PluginError."""
