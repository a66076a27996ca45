"""The engine: one loop for plain decoding, chains and trees."""

from specdec_core.engine.engine import Engine

__all__ = ["Engine"]
