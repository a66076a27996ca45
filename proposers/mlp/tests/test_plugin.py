"""Tests of what the plugin plans before weights are loaded, of the detection of the method, and of the errors for
speculators that do not fit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import BIN, CPU, SAFETENSORS, Change, put, state, write_checkpoint
from mlp_reference import random_weights

from specdec_core import LLM, CompatibilityError, ConfigError, Plan, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_core.budget.budget import Budget
from specdec_proposer_mlp import MLPSpeculatorConfig
from specdec_testing import tiny_target

VOCAB_SIZE, HIDDEN_SIZE = 48, 32
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "emb_dim": HIDDEN_SIZE, "inner_dim": 24}
HEADS = {"n_predict": 3, "top_k_tokens_per_head": [4, 3, 2], "n_candidates": 5}
TIED = HEADS | {"tie_weights": True, "scale_input": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def written(folder: Path, case: dict[str, Any] = HEADS, *, tied_storage: str = "once", **more: Any) -> str:
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", **SIZES, **case}
    weights = random_weights(config, torch.Generator().manual_seed(1), tied_storage)
    floats = {name: tensor.float() for name, tensor in weights.items()}
    return str(write_checkpoint(folder, config, floats, **more))


def dry(target: Path, **config: Any) -> Any:
    return dry_run(str(target), speculative_config=config, skip_tokenizer_init=True, dtype="float32")


def planned(target: Path, **config: Any) -> Plan:
    return dry(target, **config).plan


def test_the_entry_module_is_light():
    code = (
        "import sys, specdec_proposer_mlp as p; p.specdec_proposers(); p.MLPSpeculatorConfig(model='any'); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("tied_storage", ["once", "all"])
def test_the_plan_is_the_speculators(tied_storage, target, tmp_path):
    model = written(tmp_path, TIED, tied_storage=tied_storage)
    plan = planned(target, method="mlp_speculator", model=model, max_model_len=100)
    assert (plan.taps, plan.kv_layout, plan.scratch_slots, plan.output_rows) == (("final",), None, 0, False)
    num_weights = 2 * VOCAB_SIZE * 24 + 24 * HIDDEN_SIZE + 24 * 24 + 2 * 24  # those of the six distinct tensors
    assert (plan.weight_bytes, plan.max_model_len) == (4 * num_weights, 100)
    assert planned(target, method="mlp_speculator", model=model).max_model_len == 512


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 3),
        ({"draft_sample_method": "probabilistic"}, 3),
        ({"n_candidates": 4}, 12),
        ({"n_candidates": 4, "num_speculative_tokens": 7}, 7),
        ({"n_candidates": 24}, 4 + 12 + 24),
        ({"speculative_token_tree": TREE}, 5),
        ({"num_speculative_tokens": 2}, 2),
    ],
)
def test_how_many_tokens_are_drafted(options, number, target, tmp_path):
    found = dry(target, method="mlp_speculator", model=written(tmp_path), **options).speculative
    assert found.num_speculative_tokens == number


@pytest.mark.parametrize(
    ("case", "file", "tied_storage"), [(HEADS, SAFETENSORS, "once"), (TIED, BIN, "all"), (TIED, SAFETENSORS, "once")]
)
def test_a_speculator_tells_its_method(case, file, tied_storage, target, tmp_path):
    model = written(tmp_path, case, file=file, tied_storage=tied_storage)
    found = dry(target, model=model, draft_tensor_parallel_size=1).speculative
    assert (found.method, found.num_speculative_tokens) == ("mlp_speculator", 3)


def test_outputs_are_those_of_plain_decoding(target, tmp_path):
    given = {"model": written(tmp_path), "draft_tensor_parallel_size": 1, "adaptive_draft_length": False}
    prompts, params = [{"prompt_token_ids": [3, 5]}, {"prompt_token_ids": [7]}], GREEDY
    outputs = []
    for config in (None, given, given | {"n_candidates": 5}, given | {"speculative_token_tree": TREE}):
        with LLM(target, speculative_config=config, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
            assert config is None or found[0].speculation.num_drafts > 0
    assert outputs.count(outputs[0]) == len(outputs)


def test_the_keywords_of_older_vllm_find_the_method(target, tmp_path, monkeypatch):
    """speculative_model without a method and without a number of tokens."""
    monkeypatch.setattr(Budget, "_choose", lambda self, rows, limits, so_far: limits)  # whatever drafting costs here
    settings = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True}
    old = {"speculative_model": written(tmp_path), "speculative_draft_tensor_parallel_size": 1}
    prompt = {"prompt_token_ids": [3, 5]}
    with pytest.warns(DeprecationWarning, match="speculative_model") as caught:
        llm = LLM(target, **old, **settings)
    (found,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (plain,) = LLM(target, **settings).generate(prompt, GREEDY, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert found.speculation.num_drafts > 0
    assert llm.engine.num_speculative_tokens == 3
    text = str(caught[0].message)
    shown = ast.literal_eval(text[text.index("{") : text.rindex("}") + 1])
    assert "method" not in shown
    new = dry(target, **shown).speculative
    assert (new.method, new.num_speculative_tokens) == ("mlp_speculator", 3)


def test_the_published_speculator_is_named(tmp_path):
    target = tiny_target(tmp_path / "Meta-Llama-3-8B-Instruct")
    with pytest.raises(ConfigError, match=r"give model='ibm-ai-platform/llama3-8b-accelerator'"):
        planned(target, method="mlp_speculator")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 4}, "would be 4 tokens deep, but .* has 3 heads: lower num_speculative_tokens"),
        (
            {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"},
            "would be 4 .* give paths of at most 3",
        ),
        ({"speculative_token_tree": "[(0,)]", "num_speculative_tokens": 2}, "speculative_token_tree has 1 nodes"),
        ({"n_candidates": 0}, "n_candidates=0"),
        ({"n_candidates": 2000}, "n_candidates=2000"),
        ({"top_k_tokens_per_head": [3, 2, 1]}, r"top_k_tokens_per_head=\[3, 2, 1\] is for a tree: give n_candidates"),
        ({"n_candidates": 2, "top_k_tokens_per_head": [3, 2]}, "has 2 numbers, but .* has 3 heads"),
        ({"n_candidates": 2, "top_k_tokens_per_head": [3, 0, 1]}, "is not a list of whole numbers from 1 to 64"),
        ({"n_candidates": 7, "top_k_tokens_per_head": [3, 2, 1]}, "makes 6 paths, of which n_candidates=7 are drafted"),
        (
            {"n_candidates": 2, "num_speculative_tokens": 7},
            r"=7, but n_candidates=2 paths by top_k_tokens_per_head=\[4, 3, 2\] have at most 6",
        ),
        ({"n_candidates": 2, "top_k_tokens_per_head": [64, 64, 2]}, "makes 8192 paths, .* and at most 4096"),
        ({"n_candidates": 2, "top_k_tokens_per_head": 3}, "top_k_tokens_per_head=3 is not a list"),
        ({"n_candidates": 2, "speculative_token_tree": TREE}, "n_candidates=2 .* and speculative_token_tree other"),
        (
            {"n_candidates": 2, "draft_sample_method": "probabilistic"},
            "and draft_sample_method other",
        ),
        ({"quantization": "int8"}, "quantization is for the method draft_model"),
        ({"max_model_len": 513}, "max_model_len=513, but the target takes 512"),
        ({"n_candidate": 2}, "did you mean 'n_candidates'"),
    ],
)
def test_wrong_options_are_explained(options, message, target, tmp_path):
    with pytest.raises(ConfigError, match=message):
        planned(target, method="mlp_speculator", model=written(tmp_path), **options)


MISFITS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (put("speculator.ln.1.bias", None), r"speculator.ln.1.bias \[24\] is missing"),
    "an unknown one": (put("speculator.fc.weight", torch.zeros(3)), r"fc.weight \[3\] is not known"),
    "one head too many": (
        put("speculator.head.3.weight", torch.zeros(48, 24)),
        r"head.3.weight .* is not known",
    ),
    "a misshapen one": (
        put("speculator.proj.0.weight", torch.zeros(24, 24)),
        r"proj.0.weight is \[24, 24\], not \[24, 32\]",
    ),
    "untied weights": (state(tie_weights=False, n_predict=2), "head.1.weight .* is missing"),
    "another target's width": (state(emb_dim=40), "emb_dim is 40, and this target's is 32"),
    "another target's tokens": (state(vocab_size=50), "vocab_size is 50, and this target's is 48"),
    "an empty config": (
        lambda config, tensors: config.clear(),
        "emb_dim, which config.json lacks, is 4096, and this target's is 32",
    ),
    "no number of heads": (state(n_predict=0), "n_predict in .* is 0, and must be an integer from 1 to 64"),
    "too many heads": (state(n_predict=300000), "n_predict in .* is 300000, and must be an integer from 1 to 64"),
    "a number as text": (state(emb_dim="32"), "emb_dim in .* is '32', and must be an integer from 1"),
    "a negative width": (
        state(inner_dim=-1),
        "inner_dim in .* is -1, and must be an integer from 0",
    ),
    "no flag": (state(tie_weights="yes"), "tie_weights in .* is 'yes', and must be True or False"),
    "no flag either": (state(scale_input=1), "scale_input in .* is 1, and must be True or False"),
    "top_k that is no list": (
        state(top_k_tokens_per_head=3),
        "top_k_tokens_per_head in .* is 3, and must be a list",
    ),
    "another kind": (state(method="sum_rnn"), "of another kind, method='sum_rnn'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_speculator_that_does_not_fit_is_refused(name, target, tmp_path):
    change, message = MISFITS[name]
    model = written(tmp_path, TIED if name == "untied weights" else HEADS, change=change)
    with pytest.raises(CompatibilityError, match=message) as caught:
        planned(target, method="mlp_speculator", model=model)
    assert repr(model) in str(caught.value)


def test_numbers_that_are_not_finite_are_refused(target, tmp_path):
    model = written(tmp_path, change=put("speculator.ln.0.weight", torch.full((24,), torch.nan)))
    with pytest.raises(CompatibilityError, match=r"not finite in speculator.ln.0.weight"):
        LLM(target, speculative_config={"model": model}, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True)


@pytest.mark.parametrize("name", ["emb.2.weight", "ln.1.bias", "proj.2.weight"])
def test_tied_weights_that_differ_are_refused(name, target, tmp_path):
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"speculator.{name}"] = 2 * tensors[f"speculator.{name}"] + 1

    model = written(tmp_path, TIED, tied_storage="all", change=change)
    with pytest.raises(CompatibilityError, match=rf"tie_weights: true, but speculator.{name} differs from speculator"):
        LLM(target, speculative_config={"model": model}, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True)


@pytest.mark.parametrize("prefix", ["speculator.", ""])
def test_tied_weights_may_be_stored_for_every_head(prefix, target, tmp_path):
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("speculator.", prefix)] = tensors.pop(name)

    model = written(tmp_path, TIED, tied_storage="all", change=change)
    config = {"method": "mlp_speculator", "model": model}
    LLM(target, speculative_config=config, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True)


def test_a_model_that_is_missing_is_explained(target, tmp_path):
    with pytest.raises(ConfigError, match=r"config.json"):
        planned(target, method="mlp_speculator", model=str(tmp_path))


def test_the_default_number_is_read_without_the_target(tmp_path):
    options = MLPSpeculatorConfig(model=written(tmp_path, HEADS | {"n_predict": 2, "top_k_tokens_per_head": [3, 2]}))
    assert options.default_num_speculative_tokens(CPU) == 2
