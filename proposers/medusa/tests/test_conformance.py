"""Runs the conformance tests of all proposers (`ProposerConformance`) on Medusa heads with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tiny_medusa import LAYOUTS, OF_THE_TARGET, write_medusa

from specdec_testing import ProposerConformance

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


class _Heads(ProposerConformance):
    method = "medusa"
    name = "medusa-vicuna-7b-v1.3"

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        return {"model": str(write_medusa(folder, LAYOUTS[cls.name]).folder), **cls.options}


class TestBuiltTree(_Heads):
    num_speculative_tokens = 7
    name = OF_THE_TARGET


@pytest.mark.nightly
class TestChoices(_Heads):
    num_speculative_tokens = 6
    name = "vLLM, some tokens"
    options = MappingProxyType({"medusa_choices": TREE})


@pytest.mark.nightly
class TestChain(_Heads):
    num_speculative_tokens = 3
    options = MappingProxyType({"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"})


@pytest.mark.nightly
class TestSampledChain(_Heads):
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestSampledTree(_Heads):
    num_speculative_tokens = 6
    name = "vLLM, some tokens of all"
    options = MappingProxyType({"medusa_choices": TREE, "draft_sample_method": "probabilistic"})
