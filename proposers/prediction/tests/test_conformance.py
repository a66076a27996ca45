from types import MappingProxyType

from specdec_testing import ProposerConformance


class TestPrediction(ProposerConformance):
    method = "prediction"


class TestOneBranch(ProposerConformance):
    method = "prediction"
    options = MappingProxyType({"prediction_max_branches": 1})
