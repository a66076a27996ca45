from types import MappingProxyType

from specdec_testing import ProposerConformance


class TestNgram(ProposerConformance):
    method = "ngram"
    options = MappingProxyType({"prompt_lookup_min": 1, "prompt_lookup_max": 3})


class TestFirstMatch(ProposerConformance):
    method = "ngram"
    options = MappingProxyType({"prompt_lookup_min": 2, "prompt_lookup_match": "first"})
