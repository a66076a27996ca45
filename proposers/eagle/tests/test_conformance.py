"""Runs the conformance tests of all proposers (`ProposerConformance`) on EAGLE heads with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tiny_heads import Target, write_eagle, write_eagle3

from specdec_testing import ProposerConformance, tiny_target

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"
SIZES = Target(hidden_size=32, vocab_size=48, num_hidden_layers=6)


class _Head(ProposerConformance):
    num_speculative_tokens = 6

    @staticmethod
    def make_target(folder: Path) -> Path:
        return tiny_target(folder, num_hidden_layers=6)

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        write = write_eagle if cls.method == "eagle" else write_eagle3
        return {"model": str(write(folder, SIZES).folder), **cls.options}


@pytest.mark.nightly
class TestEagleDynamic(_Head):
    method = "eagle"
    options = MappingProxyType({"eagle_topk": 3, "eagle_depth": 3})


class TestEagle3Dynamic(_Head):
    method = "eagle3"
    options = MappingProxyType({"eagle_topk": 3, "eagle_depth": 3})


@pytest.mark.nightly
class TestEagle3Chain(_Head):
    method = "eagle3"
    options = MappingProxyType({"eagle_topk": 1})


class TestEagle3SampledTree(_Head):
    method = "eagle3"
    options = MappingProxyType({"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"})


class TestEagleSampledChain(_Head):
    method = "eagle"
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestEagle3LikelyDynamic(_Head):
    method = "eagle3"
    options = MappingProxyType({"eagle_topk": 3, "eagle_depth": 3, "eagle_min_prob": 0.2})
