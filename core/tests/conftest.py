"""Fixtures shared by core's tests."""

from __future__ import annotations

import pytest
from tiny_setup import install_bigram, save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a tiny random model and its tokenizer."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def bigram_site(tmp_path_factory):
    """A folder with an installed test plugin, the proposer `bigram`. Tests must add the folder to sys.path."""
    return install_bigram(tmp_path_factory.mktemp("site"))
