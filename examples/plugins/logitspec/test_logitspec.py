from specdec_testing import ProposerConformance


class TestLogitSpec(ProposerConformance):
    method = "logitspec"
