"""Imports transformers without the messages of packages that it imports only if they are installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOUD = ("torchao", "torch.utils._pytree")
"""Loggers: torchao warns of its GPU kernels on a machine without a GPU, and torch warns of torchao."""


@contextmanager
def importing_quietly() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
