from types import MappingProxyType

from specdec_testing import ProposerConformance


class TestOwnTokensOnly(ProposerConformance):
    method = "suffix"
    options = MappingProxyType({"suffix_decoding_max_cached_requests": 0})


class TestTrees(ProposerConformance):
    method = "suffix"
    options = MappingProxyType({"suffix_decoding_max_cached_requests": 0, "suffix_decoding_use_tree": True})


class TestOutputsOfOthers(ProposerConformance):
    method = "suffix"
    options = MappingProxyType({"suffix_decoding_max_cached_requests": 2})
    skips = MappingProxyType(
        {
            "test_batch_does_not_matter": "what other requests wrote is what it learns from",
            "test_draft_after_preemption": "by then, others have written more",
            "test_reused_ids": "by then, others have written more",
        }
    )
