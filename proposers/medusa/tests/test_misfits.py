"""Tests of the errors for Medusa heads that do not fit the target, or are not whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import Change, put, state
from safetensors.torch import save_file
from tiny_medusa import HIDDEN_SIZE, LAYOUTS, VOCAB_SIZE, Layout, write_medusa

from specdec_core import LLM, CompatibilityError, ConfigError
from specdec_core.api.arguments import dry_run
from specdec_testing import tiny_target

AUTHORS = LAYOUTS["medusa-vicuna-7b-v1.3"]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def written(folder: Path, layout: Layout = AUTHORS, change: Change | None = None) -> str:
    return str(write_medusa(folder, layout, change=change).folder)


def plan(target: Path, model: str) -> None:
    dry_run(str(target), speculative_config={"method": "medusa", "model": model}, skip_tokenizer_init=True)


def _only_prefixed_blocks(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensor = tensors.pop(name)
        if name.startswith("blocks."):
            tensors[f"medusa_heads.{name}"] = tensor


VLLM, SOME = LAYOUTS["vLLM, two layers"], LAYOUTS["vLLM, some tokens"]
SQUARE = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
MISFITS: dict[str, tuple[Layout, Change, str]] = {
    "a missing layer": (AUTHORS, put("1.0.linear.weight", None), r" 1.0.linear.weight \[32, 32\] is missing"),
    "a missing bias": (AUTHORS, put("4.0.linear.bias", None), r" 4.0.linear.bias \[32\] is missing"),
    "a missing output layer": (AUTHORS, put("4.1.weight", None), r" 4.1.weight \[48, 32\] is missing"),
    "a missing one in between": (AUTHORS, put("1.1.weight", None), r" 1.1.weight \[48, 32\] is missing"),
    "vLLM's, a missing output layer": (VLLM, put("lm_heads.2.weight", None), r"lm_heads.2.weight .* is missing"),
    "vLLM's, a missing layer": (
        VLLM,
        put("blocks.1.layers.1.weight", None),
        r" blocks.1.layers.1.weight .* is missing",
    ),
    "one output layer left": (
        VLLM,
        lambda config, tensors: [tensors.pop(f"lm_heads.{i}.weight") for i in (1, 2)],
        r"lm_heads.1.weight .* is missing",
    ),
    "vLLM's, no output layers": (
        VLLM,
        lambda config, tensors: [tensors.pop(f"lm_heads.{i}.weight") for i in range(3)],
        r"lm_heads.0.weight .* is missing",
    ),
    "a gap": (VLLM, put("lm_heads.300000.weight", torch.zeros(48, 32)), "has the number 300000"),
    "an unknown tensor": (AUTHORS, put("fc.weight", torch.zeros(3)), r"fc.weight \[3\] is not known"),
    "a layer too many": (
        VLLM,
        put("blocks.1.layers.2.weight", SQUARE),
        r"blocks.1.layers.2.weight .* not known",
    ),
    "two output layers of a head": (
        AUTHORS,
        put("0.2.weight", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)),
        "0.2.weight is one tensor too many for lm_heads.0.weight",
    ),
    "another target's width": (
        AUTHORS,
        put("0.0.linear.weight", torch.zeros(40, 40)),
        r"is \[40, 40\], not \[32",
    ),
    "another target's tokens": (
        AUTHORS,
        lambda config, tensors: tensors.update({f"{i}.1.weight": torch.zeros(50, 32) for i in range(5)}),
        "rows of its LM heads is 50, and this target's is 48",
    ),
    "another target's tokens in one head": (
        AUTHORS,
        put("3.1.weight", torch.zeros(50, 32)),
        r" 3.1.weight is \[50, 32\], not \[48, 32\]",
    ),
    "a scale as text": (VLLM, state(logit_scale="1"), "logit_scale in .* is '1'"),
    "a truth value as text": (SOME, state(original_lm_head="true"), "original_lm_head in .* is 'true'"),
    "no token map": (SOME, put("token_map", None), "truncated_vocab_size in .* is 20, .* it has none"),
    "a token map of another length": (SOME, put("token_map", torch.arange(19)), r"is 20, .* it has \[19\]"),
    "no size of the vocabulary": (
        SOME,
        state(truncated_vocab_size=None),
        "rows of its LM heads is 20, and this target's is 48",
    ),
    "another number of heads": (
        VLLM,
        state(num_heads=5),
        "num_heads in config.json of .* is 5, .* tensors are of 3",
    ),
    "a number of heads as text": (VLLM, state(num_heads="many"), "num_heads in config.json of .* is 'many'"),
    "another number of layers": (
        VLLM,
        state(num_hidden_layers=7),
        "num_hidden_layers in .* is 7, .* tensors are of 2",
    ),
    "another width": (VLLM, state(hidden_size=64), "hidden_size is 64, and this target's is 32. Use one that"),
    "another vocabulary": (VLLM, state(vocab_size="48"), "vocab_size is '48', and this target's is 48. Use"),
    "biases that are there": (
        LAYOUTS["vLLM, some tokens"],
        state(medusa_fc_bias=not LAYOUTS["vLLM, some tokens"].has_bias),
        "medusa_fc_bias in config.json of .* is (True|False), and its tensors are of (True|False): download",
    ),
    "a list of accuracies too few": (
        AUTHORS,
        state(medusa_head_accuracies=[[0.5]] * 4),
        "in config.json of .*, medusa_head_accuracies has 4 lists, but .* has 5 Medusa heads",
    ),
    "a lost head": (
        VLLM,
        lambda config, tensors: [tensors.pop(n) for n in [*tensors] if n.startswith(("blocks.2.", "lm_heads.2."))],
        "num_heads in config.json of .* is 3, .* tensors are of 2",
    ),
    "accuracies as text": (
        AUTHORS,
        state(medusa_head_accuracies="high"),
        "in config.json of .*, medusa_head_accuracies='high' is not a list of lists of numbers",
    ),
    "prefixed, no output layers": (VLLM, _only_prefixed_blocks, r"lm_heads.0.weight .* is missing"),
    "a vocabulary without LM heads": (
        AUTHORS,
        lambda config, tensors: (
            [tensors.pop(f"{i}.1.weight") for i in range(5)],
            config.update(truncated_vocab_size=20),
            tensors.update({"token_map": torch.arange(20)}),
        ),
        "have no LM heads of their own, and a vocabulary of 20 tokens",
    ),
    "a size as text": (SOME, state(truncated_vocab_size="20"), "truncated_vocab_size in .* is '20'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_heads_that_do_not_fit_are_refused(name, target, tmp_path):
    layout, change, message = MISFITS[name]
    with pytest.raises(CompatibilityError, match=message):
        plan(target, written(tmp_path, layout, change))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (SOME, put("token_map", torch.full((20,), 48)), "does not map to different ids below 48"),
        (SOME, put("token_map", torch.zeros(20, dtype=torch.int64)), "does not map to different ids below 48"),
        (SOME, put("token_map", torch.arange(20) - 1), "does not map to different ids below 48"),
        (SOME, put("token_map", torch.arange(20) + 0.7), "float32 .* does not map to different ids below 48"),
        (AUTHORS, put("0.0.linear.bias", torch.full((32,), torch.inf)), "not finite in 0.0.linear.bias"),
        (AUTHORS, put("0.0.linear.weight", SQUARE.to(torch.int8)), " 0.0.linear.weight torch.int8"),
    ],
)
def test_weights_that_make_no_sense_are_refused(layout, change, message, target, tmp_path):
    config = {"method": "medusa", "model": written(tmp_path, layout, change)}
    with pytest.raises(CompatibilityError, match=message):
        LLM(target, speculative_config=config, **SETTINGS)


def test_heads_in_several_files_are_found(target, tmp_path):
    whole = write_medusa(tmp_path / "whole", VLLM)
    names, folder = sorted(whole.tensors), tmp_path / "shards"
    folder.mkdir()
    shutil.copy(whole.folder / "config.json", folder)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: whole.tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    plan(target, str(folder))


def test_a_chain_of_more_tokens_than_heads_is_refused(target, tmp_path):
    config = {"method": "medusa", "model": written(tmp_path), "draft_sample_method": "probabilistic"}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8, but .* has 5 Medusa heads, and a chain"):
        dry_run(str(target), speculative_config=config | {"num_speculative_tokens": 8}, skip_tokenizer_init=True)


def test_what_is_no_head_is_explained(target, tmp_path):
    model = written(tmp_path, AUTHORS, lambda config, tensors: (tensors.clear(), tensors.update({"x": SQUARE})))
    with pytest.raises(CompatibilityError, match=r"has no Medusa heads: its tensors are \['x'\]"):
        plan(target, model)
    with pytest.raises(ConfigError, match=r"is not a folder, and medusa_lm_head.safetensors or medusa_lm_head.pt or"):
        plan(target, str(tmp_path / "no"))
