"""Tests of what the plugin plans before weights are loaded, of the detection of the method, and of its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import Change
from tiny_medusa import HIDDEN_SIZE, LAYOUTS, NUM_MAPPED, OF_THE_TARGET, VOCAB_SIZE, Layout, write_medusa

from specdec_core import LLM, ConfigError, Plan, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_proposer_medusa import MedusaConfig
from specdec_proposer_medusa.config import ON_CPU, ON_GPU
from specdec_testing import tiny_target

AUTHORS = LAYOUTS["medusa-vicuna-7b-v1.3"]
CHOICES = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def written(folder: Path, layout: Layout = AUTHORS, change: Change | None = None) -> str:
    return str(write_medusa(folder, layout, change=change).folder)


def dry(target: Path, **config: Any) -> Any:
    return dry_run(str(target), speculative_config=config, skip_tokenizer_init=True, dtype="float32")


def planned(target: Path, **config: Any) -> Plan:
    return dry(target, method="medusa", **config).plan


def test_the_entry_module_is_light():
    code = (
        "import sys, specdec_proposer_medusa as p; p.specdec_proposers(); p.MedusaConfig(model='any'); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("medusa-vicuna-7b-v1.3", 5 * (HIDDEN_SIZE * HIDDEN_SIZE + HIDDEN_SIZE + VOCAB_SIZE * HIDDEN_SIZE)),
        ("two layers", 3 * (2 * (HIDDEN_SIZE * HIDDEN_SIZE + HIDDEN_SIZE) + VOCAB_SIZE * HIDDEN_SIZE)),
        (OF_THE_TARGET, 3 * (HIDDEN_SIZE * HIDDEN_SIZE + HIDDEN_SIZE)),
        ("vLLM, lm_head", 3 * (HIDDEN_SIZE * HIDDEN_SIZE + HIDDEN_SIZE) + VOCAB_SIZE * HIDDEN_SIZE),
        ("vLLM, some tokens", 3 * (HIDDEN_SIZE * HIDDEN_SIZE + HIDDEN_SIZE + NUM_MAPPED * HIDDEN_SIZE)),
    ],
)
def test_the_plan_is_the_heads(name, num_weights, target, tmp_path):
    plan = planned(target, model=written(tmp_path, LAYOUTS[name]), max_model_len=100)
    assert (plan.taps, plan.kv_layout, plan.scratch_slots, plan.output_rows) == (("final",), None, 0, False)
    assert (plan.weight_bytes, plan.max_model_len) == (4 * num_weights, 100)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, ON_CPU),
        ({"draft_sample_method": "probabilistic"}, 5),
        ({"medusa_choices": CHOICES}, 5),
        ({"medusa_choices": str(CHOICES), "num_speculative_tokens": 5}, 5),
        ({"speculative_token_tree": CHOICES[:2]}, 2),
        ({"medusa_head_accuracies": [[0.5, 0.1], [0.2], [0], [0], [0]]}, 4),
        ({"num_speculative_tokens": 20}, 20),
    ],
)
def test_how_many_tokens_are_drafted(options, number, target, tmp_path):
    found = dry(target, method="medusa", model=written(tmp_path), **options).speculative
    assert found.num_speculative_tokens == number


def test_the_default_tree_is_for_the_engines_device(tmp_path):
    options = MedusaConfig(model=written(tmp_path))
    sizes = [options.default_num_speculative_tokens(torch.device(name)) for name in ("cpu", "cuda")]
    assert sizes == [ON_CPU, ON_GPU] == [7, 63]


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.layers])  # others must be named
def test_heads_tell_their_method(name, target, tmp_path):
    found = dry(target, model=written(tmp_path, LAYOUTS[name]), draft_tensor_parallel_size=1).speculative
    assert (found.method, found.num_speculative_tokens) == ("medusa", ON_CPU)


@pytest.mark.parametrize("name", ["medusa-vicuna-7b-v1.3", OF_THE_TARGET, "vLLM, some tokens of all"])
def test_outputs_are_those_of_plain_decoding(name, target, tmp_path):
    given = {"method": "medusa", "model": written(tmp_path, LAYOUTS[name]), "draft_tensor_parallel_size": 1}
    given["adaptive_draft_length"] = False
    prompts = [{"prompt_token_ids": [3, 5]}, {"prompt_token_ids": [7]}]
    outputs = []
    for config in (None, given, given | {"medusa_choices": CHOICES}, given | {"draft_sample_method": "probabilistic"}):
        with LLM(target, speculative_config=config, **SETTINGS) as llm:
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
            assert config is None or found[0].speculation.num_drafts > 0
    assert outputs.count(outputs[0]) == len(outputs)


def test_the_published_heads_are_named(tmp_path):
    target = tiny_target(tmp_path / "vicuna-7b-v1.3")
    with pytest.raises(ConfigError, match=r"give model='FasterDecoding/medusa-vicuna-7b-v1.3'"):
        planned(target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"medusa_choices": [(0,) * (i + 1) for i in range(6)]},
            "6 tokens deep, but .* has 5 heads: give paths of at most 5",
        ),
        (
            {"speculative_token_tree": [(0,) * (i + 1) for i in range(6)]},
            "6 tokens deep, but .* has 5 heads: give paths of at most 5",
        ),
        (
            {"medusa_choices": CHOICES, "num_speculative_tokens": 6},
            "num_speculative_tokens=6, but medusa_choices has 5 nodes",
        ),
        (
            {"medusa_choices": CHOICES, "num_speculative_tokens": 3},
            "num_speculative_tokens=3, but medusa_choices has 5 nodes",
        ),
        (
            {"medusa_head_accuracies": [[0.5], [0], [0], [0], [0]], "num_speculative_tokens": 2},
            "num_speculative_tokens=2, but .* 1 nodes",
        ),
        (
            {"medusa_head_accuracies": [[0.5]]},
            "medusa_head_accuracies has 1 lists, but .* has 5 Medusa heads: give one",
        ),
        ({"medusa_head_accuracies": [[0.6, 0.5]] * 5}, r"has \[0.6, 0.5\], whose sum is 1.1: .* at most 1"),
        ({"medusa_head_accuracies": [[0.2, 0.3]] * 5}, r"has \[0.2, 0.3\], which increases: give the share of the li"),
        ({"medusa_choices": [(0,), (0, 1)]}, r"medusa_choices has the path \(0, 1\) without \(0, 0\)"),
        ({"medusa_choices": "[(0"}, "medusa_choices=.* is not a list of paths"),
        ({"medusa_head_accuracies": [[0.5], [1.5]]}, "medusa_head_accuracies=.* is not a list of lists of numbers"),
        ({"medusa_head_accuracies": []}, "medusa_head_accuracies=.* is not a list of lists of numbers"),
        (
            {"medusa_head_accuracies": [[0.5]], "draft_sample_method": "probabilistic"},
            "medusa_head_accuracies builds trees .*, and draft_sample_method='probabilistic' samples chains",
        ),
        ({"medusa_head_accuracies": [0.5]}, "medusa_head_accuracies=.* is not a list of lists of numbers"),
        (
            {"medusa_choices": CHOICES, "medusa_head_accuracies": [[0.5]]},
            "medusa_choices and medusa_head_accuracies each give the tree's shape",
        ),
        (
            {"medusa_choices": CHOICES, "speculative_token_tree": CHOICES},
            "speculative_token_tree and medusa_choices each give the tree's shape",
        ),
        ({"quantization": "int8"}, "quantization is for the method draft_model"),
        ({"max_model_len": 513}, "max_model_len=513, but the target takes 512"),
        ({"medusa_choice": CHOICES}, "did you mean 'medusa_choices'"),
    ],
)
def test_wrong_options_are_explained(options, message, target, tmp_path):
    with pytest.raises(ConfigError, match=message):
        planned(target, model=written(tmp_path), **options)


def test_accuracies_of_the_checkpoint_give_the_tree(target, tmp_path):
    rows = [[0.5, 0.1], [0.2], [0], [0], [0]]
    model = written(tmp_path, AUTHORS, lambda config, tensors: config.update(medusa_head_accuracies=rows))
    assert dry(target, method="medusa", model=model).speculative.num_speculative_tokens == 4
    assert planned(target, model=model).state.shape.paths == ((0,), (1,), (0, 0), (1, 0))
    with pytest.raises(ConfigError, match=r"medusa_head_accuracies has 8 lists, but .* has 5 Medusa heads"):
        planned(target, model=model, medusa_head_accuracies=[[0.5]] * 8)
