"""Paged storage of keys and values."""

from specdec_core.kv.paged import PagedKVManager

__all__ = ["PagedKVManager"]
