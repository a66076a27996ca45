"""Fixtures for the tests of `spec-decode bench` and `spec-decode demo`."""

from __future__ import annotations

import pytest
from tiny_setup import install_bigram, save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of a tiny random model and its tokenizer."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def bigram_site(tmp_path_factory):
    """A folder in which the proposer plugin `bigram` is installed. Tests prepend it to sys.path."""
    return install_bigram(tmp_path_factory.mktemp("site"))
