"""The conformance kit: what a proposer must do, as tests that say so.

From the command line, for a plugin that is installed:

    pytest --pyargs specdec_core.testing.conformance --specdec-proposer NAME --specdec-option KEY=VALUE

or among a plugin's own tests:

    from specdec_core.testing import ProposerConformance

    class TestMine(ProposerConformance):
        method = "mine"
        options = {"some_option": 3}
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None or find_spec("pytest") is None:
    raise ImportError("the conformance kit needs pytest and hypothesis: pip install 'specdec-core[testing]'")

from specdec_core.testing.conformance.kit import ProposerConformance

__all__ = ["ProposerConformance"]
