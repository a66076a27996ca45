"""Lets capfd see what transformers logs."""

from __future__ import annotations

import logging
import sys

import pytest


def log_to_stderr(patch: pytest.MonkeyPatch) -> None:
    """Let transformers log to the present sys.stderr, as it does outside of tests, at its default level. It keeps the
    stream that there was when it was imported, perhaps in another test, and the level that a command has set."""
    logging.getLogger("transformers").setLevel(logging.WARNING)
    handlers = logging.getLogger("transformers").handlers
    patch.setattr(next(each for each in handlers if type(each) is logging.StreamHandler), "stream", sys.stderr)
