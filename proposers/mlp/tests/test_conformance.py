"""Runs the conformance tests of all proposers (`ProposerConformance`) on MLP speculators with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from draft_heads import write_checkpoint
from mlp_reference import random_weights

from specdec_testing import ProposerConformance

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


class _Speculator(ProposerConformance):
    method = "mlp_speculator"
    is_tied = False

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        sizes = {"vocab_size": 48, "emb_dim": 32, "inner_dim": 24, "n_predict": 4}
        config = sizes | {"top_k_tokens_per_head": [4, 3, 2, 2], "tie_weights": cls.is_tied, "scale_input": cls.is_tied}
        weights = random_weights(config, torch.Generator().manual_seed(2))
        floats = {name: tensor.float() for name, tensor in weights.items()}
        return {"model": str(write_checkpoint(folder, config, floats)), **cls.options}


@pytest.mark.nightly
class TestChain(_Speculator):
    num_speculative_tokens = 4
    is_tied = True


class TestPaths(_Speculator):
    num_speculative_tokens = 8
    options = MappingProxyType({"n_candidates": 4})


@pytest.mark.nightly
class TestSampledChain(_Speculator):
    num_speculative_tokens = 4
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestTree(_Speculator):
    num_speculative_tokens = 6
    options = MappingProxyType({"speculative_token_tree": TREE})


@pytest.mark.nightly
class TestSampledTree(_Speculator):
    num_speculative_tokens = 6
    options = MappingProxyType({"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"})
