"""A plugin whose entry module imports torch, one of the faults listed in testing/tests/broken_proposers/case.py."""

import torch  # noqa: F401
from example_proposer import RecentConfig, build, plan

from specdec_core import ProposerSpec, hookimpl


@hookimpl
def specdec_proposers():
    return [ProposerSpec("heavy", RecentConfig, build, plan=plan, api=1)]
