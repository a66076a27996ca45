from specdec_testing import VerifierConformance


class TestRelaxedAcceptance(VerifierConformance):
    verifier = "relaxed_acceptance"
