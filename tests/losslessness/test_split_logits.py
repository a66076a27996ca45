"""A model that ranks share has the logits of the whole model, in every family that transformers has a plan for; and a
mistake in what a rank holds or sums shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, RECURRENT, save_family
from tiny_models import save_tiny_model

from specdec_core import CompatibilityError
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.models import split, split_plan
from specdec_core.models.split_modules import Part

pytestmark = pytest.mark.usefixtures("lasting")

NUM_TOKENS = 24
TOLERANCE = 1e-4
NO_PLAN = ("bitnet", "gpt2", "gpt_oss", "hunyuan_v1_dense", "opt", "persimmon", "stablelm")
BY_DAY = ("llama", "qwen2", "qwen3", "gemma2", "mixtral", "phi3", "deepseek_v2", "gpt_neox")
CASES = [
    pytest.param(name, size, marks=() if name in BY_DAY else pytest.mark.nightly)
    for name in sorted(FAMILIES.keys() - {*NO_PLAN, *RECURRENT})
    for size in (2, 4)
]
FEWEST = {"max_model_len": 64, "num_kv_blocks": 8}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save_family(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return folder


@contextmanager
def opened(make_llm: Any, folder: Path, size: int) -> Iterator[Any]:
    llm = make_llm(folder, None, tensor_parallel_size=size, **FEWEST)
    try:
        yield llm
    finally:
        llm.close()


@torch.inference_mode()
def logits_of(llm: Any) -> torch.Tensor:
    """Logits [NUM_TOKENS, vocab] of a prompt, computed in two forward passes: the second one reads the cache."""
    target, block_size, found = llm.engine.target, 16, []
    for start in (0, NUM_TOKENS // 2):
        positions = torch.arange(start, start + NUM_TOKENS // 2)
        metadata = KVMetadata((start,), (len(positions),), torch.arange(2).unsqueeze(0), positions, block_size)
        token_ids = positions * 7 % target.info.vocab_size
        visibility = Visibility(positions, positions + 1)
        rows = torch.arange(len(positions))
        found.append(target.forward(token_ids, positions, metadata, visibility, rows)[0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def whole(folder_of: Callable[[str], Path], make_llm: Any) -> Callable[[str], torch.Tensor]:
    known: dict[str, torch.Tensor] = {}

    def logits(name: str) -> torch.Tensor:
        if name not in known:
            with opened(make_llm, folder_of(name), 1) as llm:
                known[name] = logits_of(llm)
        return known[name]

    return logits


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_are_those_of_the_whole_model(name, size, folder_of, make_llm, whole):
    with opened(make_llm, folder_of(name), size) as llm:
        assert (logits_of(llm) - whole(name)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", NO_PLAN)
def test_a_family_without_a_plan_is_refused_with_the_reason(name, folder_of, make_llm):
    with pytest.raises(CompatibilityError, match=f"no plan for splitting '{name}' models.*tensor_parallel_size=1"):
        make_llm(folder_of(name), None, tensor_parallel_size=2, **FEWEST)


@pytest.mark.parametrize("name", RECURRENT[:2])
def test_recurrent_layers_are_not_split(name, folder_of, make_llm):
    with pytest.raises(CompatibilityError, match=r"keep a state for each request.*give tensor_parallel_size=1"):
        make_llm(folder_of(name), None, tensor_parallel_size=2, **FEWEST)


def test_layers_as_wide_as_all_key_heads_are_not_taken_for_keys(tmp_path, make_llm):
    """The attention's output has as many features as the two key heads, which are repeated."""
    folder = save_tiny_model("llama", tmp_path / "narrow", hidden_size=32)
    found = []
    for size in (1, 4):
        with opened(make_llm, folder, size) as llm:
            found.append(logits_of(llm))
    assert (found[0] - found[1]).abs().max() < TOLERANCE


def skip_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Part, "sum", lambda part, partial: part.gather(partial)[0])


def read_another_part(patch: pytest.MonkeyPatch) -> None:
    def read(cut: split.Cut, whole: Any) -> torch.Tensor:
        shifted = [(start + end - start, 2 * end - start) for start, end in cut.intervals]
        return right(split.Cut(cut.shape, cut.dim, tuple(shifted)), whole)

    right = split.Cut.read
    patch.setattr(split.Cut, "read", read)


def repeat_another_head(patch: pytest.MonkeyPatch) -> None:
    right = split_plan._Splitting._repeated

    def repeated(self: Any, *args: Any) -> Any:
        return [(name, (start + end, 2 * end)) for name, (start, end) in right(self, *args)]

    patch.setattr(split_plan._Splitting, "_repeated", repeated)


@pytest.mark.parametrize("mistake", [skip_sums, read_another_part, repeat_another_head])
def test_a_mistake_of_one_rank_shows_in_the_logits(mistake, folder_of, make_llm, whole, monkeypatch):
    mistake(monkeypatch)
    with opened(make_llm, folder_of("llama"), 4) as llm:
        assert (logits_of(llm) - whole("llama")).abs().max() > 100 * TOLERANCE


def test_heads_that_are_not_repeated_are_refused(folder_of, make_llm, monkeypatch):
    """Without the repetition, a rank would get half a head of keys."""
    monkeypatch.setattr(split_plan._Splitting, "_repeated", lambda *args: ())
    with pytest.raises(CompatibilityError):
        make_llm(folder_of("llama"), None, tensor_parallel_size=4, **FEWEST)
