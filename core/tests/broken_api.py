"""A plugin that declares an unsupported plugin API version. The conformance kit (the tests for plugins) must report
it."""

from example_proposer import RecentConfig, build, plan

from specdec_core import ProposerSpec, hookimpl


@hookimpl
def specdec_proposers():
    return [ProposerSpec("foreign", RecentConfig, build, plan=plan, api=0)]
