"""Runs the conformance tests of all proposers (`ProposerConformance`) on MTP modules with random weights, in the
target's own checkpoint."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import pytest
from tiny_mtp import llama_with_modules

from specdec_testing import ProposerConformance

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


class _Module(ProposerConformance):
    method = "mtp"
    make_target = staticmethod(llama_with_modules)


@pytest.mark.nightly
class TestDefault(_Module):
    num_speculative_tokens = 1


@pytest.mark.nightly
class TestChain(_Module):
    num_speculative_tokens = 4


class TestSampledTree(_Module):
    num_speculative_tokens = 6
    options = MappingProxyType({"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestTree(_Module):
    num_speculative_tokens = 6
    options = MappingProxyType({"speculative_token_tree": TREE})


@pytest.mark.nightly
class TestSampledChain(_Module):
    num_speculative_tokens = 4
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestWindow(_Module):
    num_speculative_tokens = 4
    options = MappingProxyType({"draft_window": 4})


class _TwoModules(ProposerConformance):
    method = "mtp"
    make_target = staticmethod(partial(llama_with_modules, number=2))


@pytest.mark.nightly
class TestTwoModulesChain(_TwoModules):
    num_speculative_tokens = 4


@pytest.mark.nightly
class TestTwoModulesSampledTree(_TwoModules):
    num_speculative_tokens = 5
    options = MappingProxyType(
        {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]", "draft_sample_method": "probabilistic"}
    )
