"""Fixtures for the tests of contracts: a tiny random target model, an LLM that runs it, and KV caches filled with
NaN."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from specdec_core import LLM, PagedKVManager
from specdec_testing import tiny_target

SETTINGS = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 200, "max_num_seqs": 8, "skip_tokenizer_init": True}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target model with random weights and without an end-of-sequence token."""
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def make_llm(target: Path) -> Callable[..., LLM]:
    """Return a function that makes an LLM with the tiny target model.

    The function takes a speculative_config (None: plain decoding), and keyword arguments of LLM, which override
    SETTINGS.
    """

    def make(speculative_config: dict[str, Any] | None = None, **keywords: Any) -> LLM:
        return LLM(target, speculative_config=speculative_config, **{**SETTINGS, **keywords})

    return make


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """Return a function that generates with an LLM.

    The function takes the LLM, the prompts as token ids, and sampling parameters. It returns each output's token ids.
    """

    def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]

    return run


@pytest.fixture
def never_written_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every new KV cache with NaN, so that reading an unwritten slot makes the output NaN."""
    add_group = PagedKVManager.add_group

    def filled(self: Any, layout: Any, *others: Any) -> int:
        number = add_group(self, layout, *others)
        for layer in range(layout.num_layers):
            for storage in self.cache(number, layer):
                storage.fill_(torch.nan)
        return number

    monkeypatch.setattr(PagedKVManager, "add_group", filled)
