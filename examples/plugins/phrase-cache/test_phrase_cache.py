from specdec_testing import ProposerConformance


class TestPhraseCache(ProposerConformance):
    method, options = "phrase_cache", {"phrase_cache_phrases": [[i % 48, i // 48, *range(9)] for i in range(2304)]}
