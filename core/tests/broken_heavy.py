"""A plugin whose entry point imports torch. The conformance kit (the tests for plugins) must report it."""

import torch  # noqa: F401
from example_proposer import RecentConfig, build, plan

from specdec_core import ProposerSpec, hookimpl


@hookimpl
def specdec_proposers():
    return [ProposerSpec("heavy", RecentConfig, build, plan=plan, api=1)]
