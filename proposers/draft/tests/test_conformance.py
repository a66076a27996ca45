"""Runs the conformance tests of all proposers (`ProposerConformance`) on draft models that agree with the target on
some tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from noisy_copy import noisy_copy
from other_vocabularies import renumber, save_words

from specdec_testing import ProposerConformance, tiny_target

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


class _DraftModel(ProposerConformance):
    method = "draft_model"

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        return {"model": str(noisy_copy(target, folder)), **cls.options}


class TestChains(_DraftModel):
    pass


@pytest.mark.nightly
class TestSampledChains(_DraftModel):
    options = MappingProxyType({"draft_sample_method": "probabilistic"})


@pytest.mark.nightly
class TestTrees(_DraftModel):
    options = MappingProxyType({"speculative_token_tree": TREE})
    num_speculative_tokens = 6


class TestSampledTrees(_DraftModel):
    options = MappingProxyType({"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"})
    num_speculative_tokens = 6


class TestOtherVocabulary(ProposerConformance):
    """Tests a draft model that has two thirds of the target's words, with other token ids, and some words of its
    own."""

    method = "draft_model"
    num_speculative_tokens = 6

    @staticmethod
    def make_target(folder: Path) -> Path:
        save_words(tiny_target(folder), [f"w{i}" for i in range(48)])
        return folder

    @classmethod
    def make_options(cls, target: Path, folder: Path) -> Mapping[str, Any]:
        ids = [*range(47, 15, -1), *[None] * 9]
        draft = renumber(target, folder, ids, noise=0.05)
        save_words(draft, [f"own{i}" if its is None else f"w{its}" for i, its in enumerate(ids)])
        options = {"speculative_token_tree": TREE, "draft_sample_method": "probabilistic"}
        return {"model": str(draft), "use_heterogeneous_vocab": True, **options}
