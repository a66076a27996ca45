"""A proposer's `build` reuses what `plan` has loaded: no checkpoint file is read twice, and vocabularies are compared
only once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec_core import LLM, Plugins, SamplingParams
from specdec_core.models import checkpoint as checkpoint_module
from specdec_model_tiny import model_path
from specdec_proposer_draft import vocabulary
from specdec_proposer_draft.token_meanings import Meanings
from specdec_testing import tiny_target

Patch = pytest.MonkeyPatch
DRAFTS = Path(model_path(), "drafts")
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def count_reads(patch: Patch, folder: Path) -> Counter[str]:
    """Count the reads of each checkpoint file in a folder from now on. Returns the counter, by file name."""
    reads: Counter[str] = Counter()
    for holder, name in ((checkpoint_module, "safe_open"), (torch, "load"), (Path, "read_text")):
        original = getattr(holder, name)

        def counted(file: Any, *args: Any, original: Any = original, **named: Any) -> Any:
            if Path(file).parent == folder:
                reads[Path(file).name] += 1
            return original(file, *args, **named)

        patch.setattr(holder, name, counted)
    return reads


def build_head(method: str, folder: Path, plugins: Any = None) -> None:
    config = {"method": method, "model": str(folder)}
    with LLM("tiny", speculative_config=config, num_kv_blocks=32, max_model_len=128, plugins=plugins) as llm:
        llm.generate(["def mean(values):\n"], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_is_read_once(method: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = Path(shutil.copytree(DRAFTS / method, tmp_path / method))
    reads = count_reads(monkeypatch, folder)
    build_head(method, folder)
    assert reads == {"config.json": 1, "model.safetensors": 1}


class Forgetful(Plugins):
    """The installed plugins with a deliberate fault: a proposer's `build` calls `plan` again instead of using the
    `state` that the first `plan` returned."""

    def proposer(self, name: str) -> Any:
        spec = super().proposer(name)

        def build(config: Any, context: Any) -> Any:
            found = spec.plan(config, context.target, context.num_speculative_tokens).state
            return spec.build(config, evolve(context, state=found))

        return evolve(spec, build=build)


def test_a_head_that_is_planned_twice_is_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = Path(shutil.copytree(DRAFTS / "eagle3", tmp_path / "eagle3"))
    reads = count_reads(monkeypatch, folder)
    build_head("eagle3", folder, Forgetful.load())
    assert reads == {"config.json": 2, "model.safetensors": 2}


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a target and of a draft model. The draft model's tokenizer has the target's words in reverse
    order."""
    words = [f"w{i}" for i in range(48)]
    folders = []
    for name, own in (("target", words), ("draft", [*reversed(words)])):
        folder = tiny_target(tmp_path / name)
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(own)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        folders.append(folder)
    assert json.loads((folders[1] / "config.json").read_text())["vocab_size"] == 48
    return folders[0], folders[1]


def count_pairings(models: tuple[Path, Path], patch: Patch, plugins: Any = None) -> tuple[int, int]:
    """Run a draft model whose vocabulary differs from the target's. Returns how often tokenizers were loaded, and how
    often vocabularies were compared."""
    calls: Counter[str] = Counter()
    of, tokenizer = Meanings.of, vocabulary._tokenizer
    patch.setattr(Meanings, "of", lambda *args: calls.update(["meanings"]) or of(*args))
    patch.setattr(vocabulary, "_tokenizer", lambda config: calls.update(["tokenizers"]) or tokenizer(config))
    config = {"method": "draft_model", "model": str(models[1]), "use_heterogeneous_vocab": True}
    settings: dict[str, Any] = {"num_kv_blocks": 64, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(models[0]), speculative_config=config, plugins=plugins, **settings) as llm:
        llm.generate([{"prompt_token_ids": [3, 5]}], GREEDY, use_tqdm=False)
    return calls["tokenizers"], calls["meanings"]


def test_vocabularies_are_paired_once(models: tuple[Path, Path], monkeypatch: Patch) -> None:
    assert count_pairings(models, monkeypatch) == (2, 2), "one of each model"


def test_vocabularies_that_are_paired_twice_are_noticed(models: tuple[Path, Path], monkeypatch: Patch) -> None:
    assert count_pairings(models, monkeypatch, Forgetful.load()) == (4, 4)
