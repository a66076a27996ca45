"""Tests of what the plugin plans before weights are loaded, of the detection of a head and its method, and of its
options."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from planned_heads import CPU, SETTINGS, SIZES, changed, planned
from safetensors.torch import save_file
from tiny_heads import BIN, SAFETENSORS, write_eagle, write_eagle3, write_specforge, write_speculators
from tiny_weights import Shape
from transformers import Gemma2Config, Gemma2ForCausalLM

from specdec_core import LLM, CompatibilityError, ConfigError, Draft, PluginError, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_proposer_eagle import EagleConfig
from specdec_proposer_eagle.config import AUTHORS, ON_CPU
from specdec_testing import tiny_target


def test_the_entry_module_is_light():
    code = (
        "import sys, specdec_proposer_eagle as p; p.specdec_proposers(); p.EagleConfig(model='any'); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_plan_is_the_heads(target, tmp_path):
    head = write_eagle3(tmp_path, SIZES, shape=Shape(head_dim=12, num_hidden_layers=2))
    plan = planned(target, method="eagle3", model=str(head.folder), eagle_topk=4, eagle_depth=3)
    layout = plan.kv_layout
    assert plan.taps == ("input.2", "input.4", "input.5")
    assert (layout.num_layers, layout.num_kv_heads, layout.key_dim, layout.keeps_nodes) == (2, 2, 12, False)
    assert plan.scratch_slots == 12
    assert plan.weight_bytes >= 2 * sum(tensor.numel() for tensor in head.tensors.values())


def test_rows_of_the_targets_output_layer_are_for_heads_that_lack_tokens(target, tmp_path):
    small = Shape(draft_vocab_size=20)
    config = {"method": "eagle3", "model": str(write_specforge(tmp_path / "eagle3", SIZES, shape=small).folder)}
    assert not planned(target, **config).output_rows
    assert planned(target, **config, eagle_context_tokens=5).output_rows
    folder = changed(
        write_specforge(tmp_path / "aligned", SIZES, shape=small),
        lambda config, tensors: config.update(output_is_target_feature=True),
    )
    aligned = {"method": "eagle3", "model": str(folder)}
    assert planned(target, **aligned).output_rows
    assert not planned(target, **aligned, eagle_context_tokens=0).output_rows
    whole = write_eagle(tmp_path / "eagle", SIZES)
    with pytest.raises(ConfigError, match="eagle_context_tokens=5 adds tokens that a draft head lacks"):
        planned(target, method="eagle", model=str(whole.folder), eagle_context_tokens=5)


def test_a_target_whose_logits_are_no_such_products_has_the_heads_tokens_alone(tmp_path):
    """If the target caps its logits, as Gemma 2 does, a head drafts only tokens of its own vocabulary. Setting
    eagle_context_tokens is then an error."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 16}
    capping = Gemma2Config(**sizes, max_position_embeddings=64, final_logit_softcapping=1.0, initializer_range=0.3)
    Gemma2ForCausalLM(capping).save_pretrained(tmp_path / "target")
    aligned = changed(
        write_specforge(tmp_path / "head", SIZES, shape=Shape(draft_vocab_size=20)),
        lambda config, tensors: config.update(output_is_target_feature=True),
    )
    config = {"method": "eagle3", "model": str(aligned), "adaptive_draft_length": False}
    prompts, params = [{"prompt_token_ids": [3, 5]}], SamplingParams(temperature=0, max_tokens=8)
    with LLM(tmp_path / "target", speculative_config=config, **SETTINGS) as llm:
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        assert output.speculation.num_drafts > 0
    with pytest.raises(CompatibilityError, match="eagle_context_tokens=5 is not possible: the target's logits"):
        LLM(tmp_path / "target", speculative_config={**config, "eagle_context_tokens": 5}, **SETTINGS)


OFFLINE = """
import sys
from specdec_core.api.arguments import dry_run
try:
    print(dry_run(sys.argv[1], speculative_config={"model": "some/head"}, skip_tokenizer_init=True).speculative.method)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.nightly
def test_a_hub_that_cannot_be_reached_is_not_a_repository_that_lacks_files(target, tmp_path):
    commit, repository = "a" * 40, tmp_path / "models--some--head"
    head = write_eagle3(tmp_path / "written", SIZES, file=BIN)
    shutil.copytree(head.folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", OFFLINE, target], env=env, capture_output=True, text=True, check=True)
    assert found.stdout == "eagle3\n", "it has no safetensors, and the hub cannot be asked for them"


@pytest.mark.parametrize(
    ("write", "method"),
    [(write_eagle, "eagle"), (write_eagle3, "eagle3"), (write_specforge, "eagle3"), (write_speculators, "eagle3")],
)
def test_a_head_tells_its_method(write, method, target, tmp_path):
    head = write(tmp_path, SIZES)
    found = dry_run(str(target), speculative_config={"model": str(head.folder)}, skip_tokenizer_init=True).speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == (method, ON_CPU.num_nodes)


def test_a_whole_model_is_no_head(target, tmp_path):
    draft = tiny_target(tmp_path, num_hidden_layers=1)
    found = dry_run(str(target), speculative_config={"model": str(draft)}, skip_tokenizer_init=True).speculative
    assert found is not None
    assert found.method == "draft_model"


def test_what_nobody_knows_is_refused(target, tmp_path):
    save_file({"any": torch.zeros(2)}, tmp_path / SAFETENSORS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PluginError, match="no installed proposer recognizes the draft checkpoint"):
        planned(target, model=str(tmp_path))


@pytest.mark.parametrize("method", ["eagle", "medusa"])
@pytest.mark.parametrize("skips", [False, True])
def test_a_head_is_no_target(method, skips, tmp_path):
    """Also one whose config.json is that of a target, which only its weights refute."""
    head = write_eagle(tmp_path, SIZES).folder
    if method == "medusa":
        save_file({"0.0.linear.weight": torch.zeros(32, 32)}, head / SAFETENSORS)
        (head / "config.json").write_text('{"model_type": "medusa"}')
    what = {"eagle": "an EAGLE head", "medusa": "a set of Medusa heads"}[method]
    with pytest.raises(CompatibilityError, match=f"^model='.*' is {what}, .* give it as model in speculative_config"):
        LLM(head, skip_tokenizer_init=skips, num_kv_blocks=8, max_model_len=64)


def test_a_head_beside_its_target_is_found(tmp_path):
    target = tiny_target(tmp_path / "target", num_hidden_layers=8)
    with pytest.raises(ConfigError, match="names no model, and no draft comes with the target"):
        planned(target, method="eagle3")
    write_eagle3(target / "drafts" / "eagle3", SIZES)
    assert planned(target, method="eagle3").taps == ("input.2", "input.4", "input.5")
    with pytest.raises(ConfigError, match="revision='main', which is of a repository, but has no model"):
        planned(target, method="eagle3", revision="main")


def test_the_published_head_is_named(tmp_path):
    target = tiny_target(tmp_path / "Llama-3.1-8B-Instruct")
    with pytest.raises(ConfigError, match=r"give model='yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'"):
        planned(target, method="eagle3")
    with pytest.raises(ConfigError, match=r"give model='yuhuili/EAGLE-LLaMA3.1-Instruct-8B'"):
        planned(target, method="eagle")


NODES = "num_speculative_tokens=3 counts the nodes of a draft tree: add eagle_topk=1 for vLLM's chain of that length"
SHAPES: list[dict[str, Any]] = [
    {"eagle_topk": 1},
    {"eagle_topk": 3},
    {"eagle_depth": 4},
    {"speculative_token_tree": "[(0,), (1,), (0, 0)]"},
    {"draft_sample_method": "probabilistic"},
]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_log_says_once_that_the_number_counts_nodes(method, target, tmp_path, caplog):
    head = (write_eagle if method == "eagle" else write_eagle3)(tmp_path, SIZES)
    config = {"method": method, "model": str(head.folder)}
    with caplog.at_level(logging.INFO, "specdec_core"):
        LLM(target, speculative_config={**config, "num_speculative_tokens": 3}, **SETTINGS)
        assert [(each.levelname, each.message) for each in caplog.records] == [("INFO", NODES)]
        caplog.clear()
        planned(target, **config)
        planned(target, **config, eagle_topk=1, num_speculative_tokens=3)
    assert not caplog.messages, "the number is the default, or users gave a shape"


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_the_log_says_nothing_about_a_given_shape(shape):
    assert EagleConfig(model="any", **shape).advice({"num_speculative_tokens": 3, **shape}) is None
    assert EagleConfig(model="any").advice({"num_speculative_tokens": None}) is None
    assert EagleConfig(model="any").advice({"num_speculative_tokens": 3, "eagle_topk": None}) == NODES


@pytest.mark.parametrize(("shape", "is_chain"), [({"eagle_topk": 1}, True), ({}, False)])
def test_a_chain_of_vllms_length(shape, is_chain, target, tmp_path, monkeypatch):
    """With the advice followed, the number is the length of a chain, as in vLLM."""
    config = {
        "method": "eagle",
        "model": str(write_eagle(tmp_path, SIZES).folder),
        "num_speculative_tokens": 3,
        **shape,
    }
    seen: list[list[int]] = []
    with LLM(target, speculative_config=config, **SETTINGS) as llm:
        decide = llm.engine._verification.decide

        def watch(schedule: Any, draft: Draft, *rest: Any) -> Any:
            seen.append(draft.tree(0).parents)
            return decide(schedule, draft, *rest)

        monkeypatch.setattr(llm.engine._verification, "decide", watch)
        prompt = [{"prompt_token_ids": [3, 5, 7]}]
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    whole = [parents for parents in seen if len(parents) == 3]
    assert whole
    assert all(parents == [-1, 0, 1] for parents in whole) == is_chain


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_name_that_is_no_path(name, target):
    with pytest.raises(ConfigError, match="model"):
        planned(target, method="eagle3", model=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eagle_topk": 0}, "eagle_topk=0"),
        ({"draft_window": 0}, "draft_window=0"),
        ({"eagle_depth": -1}, "eagle_depth=-1"),
        ({"quantization": "int8"}, "quantization is for the method draft_model"),
        ({"eagle_topk": 2, "speculative_token_tree": "[(0,)]"}, "leave either out"),
        ({"eagle_topk": 2, "draft_sample_method": "probabilistic"}, "leave eagle_topk out for a chain"),
        ({"eagle_top_k": 2}, "did you mean 'eagle_topk'"),
        ({"eagle_min_prob": 1.5}, "eagle_min_prob=1.5 is out of range"),
        ({"eagle_min_prob": 0.5, "speculative_token_tree": "[(0,)]"}, "stops dynamic trees"),
        ({"eagle_min_prob": 0.5, "draft_sample_method": "probabilistic"}, "stops dynamic trees"),
        ({"eagle_topk": 2, "eagle_depth": 1, "num_speculative_tokens": 7}, "at most 6 nodes"),
        ({"eagle_topk": 1, "eagle_depth": 1, "num_speculative_tokens": 3}, "at most 2 nodes"),
        ({"speculative_token_tree": "[(0,)]", "num_speculative_tokens": 2}, "speculative_token_tree has 1 nodes"),
        ({"max_model_len": 513}, "max_model_len=513, but the target takes 512"),
        ({"revision": "v2"}, "revision='v2' is one of a repository, but model='.*' is a folder"),
    ],
)
def test_wrong_options_are_explained(options, message, target, tmp_path):
    head = write_eagle3(tmp_path, SIZES)
    with pytest.raises(ConfigError, match=message):
        planned(target, method="eagle3", model=str(head.folder), **options)


@pytest.mark.parametrize(
    ("options", "number", "is_dynamic"),
    [
        ({}, ON_CPU.num_nodes, True),
        ({"eagle_topk": 2, "eagle_depth": 1}, 6, True),
        ({"eagle_topk": 1}, 5, True),
        ({"eagle_topk": 1, "eagle_depth": 2}, 3, True),
        ({"draft_sample_method": "probabilistic"}, 5, False),
        ({"speculative_token_tree": [(0,), (1,)]}, 2, False),
    ],
)
def test_how_many_nodes(options, number, is_dynamic):
    config = EagleConfig(model="any", **options)
    assert (config.default_num_speculative_tokens(CPU), config.is_dynamic) == (number, is_dynamic)


@pytest.mark.parametrize(
    ("options", "min_prob"),
    [
        ({}, ON_CPU.min_prob),
        ({"eagle_min_prob": 0}, 0),
        ({"eagle_topk": 1, "eagle_min_prob": 0.4}, 0.4),
        ({"eagle_topk": 2}, 0),
        ({"eagle_depth": 2}, 0),
        ({"speculative_token_tree": [(0,)]}, 0),
    ],
)
def test_only_the_default_tree_ends_early_by_itself(options, min_prob):
    assert EagleConfig(model="any", **options).on(CPU).min_prob == min_prob


def test_the_default_tree_is_for_the_engines_device(target, tmp_path):
    """The size of the default tree depends on the device that the engine uses, even if the machine has a faster one."""
    for device, size in ((CPU, ON_CPU), (torch.device("cuda"), AUTHORS)):
        config = EagleConfig(model="any")
        found = config.on(device)
        number = config.default_num_speculative_tokens(device)
        assert (found.top_k, found.depth(number), number, found.min_prob) == size


def test_half_precision_heads_run(target, tmp_path):
    head = write_eagle3(tmp_path, SIZES, file=SAFETENSORS, shape=Shape(dtype=torch.float16))
    llm = LLM(str(target), speculative_config={"model": str(head.folder), "num_speculative_tokens": 8}, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(str(target), **SETTINGS).generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
    outputs = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_a_long_chain_beside_a_request_that_is_nearly_full(target, tmp_path):
    head = write_specforge(tmp_path, SIZES)
    chain = {"method": "eagle3", "model": str(head.folder), "eagle_topk": 1, "num_speculative_tokens": 80}
    prompts = [{"prompt_token_ids": [3, 5] * 62}, {"prompt_token_ids": [3, 5]}]
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in (4, 126)]
    outputs = []
    for config in (None, chain):
        with LLM(target, max_model_len=128, speculative_config=config, **SETTINGS) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in found])
    assert outputs[0] == outputs[1]
