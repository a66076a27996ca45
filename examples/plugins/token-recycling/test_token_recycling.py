from specdec_testing import ProposerConformance


class TestTokenRecycling(ProposerConformance):
    method, skips = "token_recycling", {"test_batch_does_not_matter": "as in the paper, requests learn from each other"}
