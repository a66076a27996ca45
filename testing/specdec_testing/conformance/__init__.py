"""The conformance kit: one test for each rule that a proposer must keep.

From the command line, for a plugin that is installed:

    pytest --pyargs specdec_testing.conformance --specdec-proposer NAME --specdec-option KEY=VALUE

or among a plugin's own tests:

    from specdec_testing import ProposerConformance

    class TestMine(ProposerConformance):
        method = "mine"
        options = {"some_option": 3}
"""

from specdec_testing.conformance.kit import ProposerConformance
from specdec_testing.conformance.kv_managers import KVManagerConformance
from specdec_testing.conformance.verifiers import VerifierConformance

__all__ = ["KVManagerConformance", "ProposerConformance", "VerifierConformance"]
