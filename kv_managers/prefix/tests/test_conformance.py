from specdec_testing import KVManagerConformance


class TestPrefix(KVManagerConformance):
    kv_manager = "prefix"


class TestPrefixWithFewCachedBlocks(KVManagerConformance):
    kv_manager = "prefix"
    options = {"max_cached_blocks": 2}  # noqa: RUF012
