"""The kit's rules, with a draft model that agrees with the target now and then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisy_copy import noisy_copy

from specdec_core.testing import ProposerConformance

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


class _DraftModel(ProposerConformance):
    method = "draft_model"

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        return {"model": str(noisy_copy(target, folder)), **cls.options}


class TestChains(_DraftModel):
    pass


class TestSampledChains(_DraftModel):
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


class TestTrees(_DraftModel):
    options = MappingProxyType({"speculative_token_tree": TREE})
    num_speculative_tokens = 6


class TestSampledTrees(_DraftModel):
    options = MappingProxyType({"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"})
    num_speculative_tokens = 6
