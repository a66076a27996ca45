"""Paged KV cache: block tables and storage."""

from specdec_core.kv.block_pool import BlockPool
from specdec_core.kv.paged import PagedKVManager

__all__ = ["BlockPool", "PagedKVManager"]
