"""A plugin for another plugin API version, one of the faults listed in testing/tests/broken_proposers/case.py."""

from example_proposer import RecentConfig, build, plan

from specdec_core import ProposerSpec, hookimpl


@hookimpl
def specdec_proposers():
    return [ProposerSpec("foreign", RecentConfig, build, plan=plan, api=0)]
