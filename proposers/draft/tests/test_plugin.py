"""Tests of what the plugin plans before weights are loaded (KV-cache layout, limits), and of the errors for options and
models that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_copy import noisy_copy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec_core import LLM, CompatibilityError, ConfigError, Plan, SamplingParams, TokenTree
from specdec_core.api.arguments import dry_run
from specdec_proposer_draft import DraftConfig
from specdec_testing import tiny_target

SETTINGS = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 32, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def plan_for(target: Path, draft: Path, **options: Any) -> Plan:
    config = {"method": "draft_model", "model": str(draft), **options}
    return dry_run(str(target), speculative_config=config, skip_tokenizer_init=True).plan


def save_tokenizer(folder: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_the_entry_module_is_light():
    code = (
        "import sys, specdec_proposer_draft as p; p.specdec_proposers(); p.DraftConfig(model='any'); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_plan_is_the_models(target, tmp_path):
    draft = tiny_target(tmp_path, num_hidden_layers=1, num_key_value_heads=2, max_position_embeddings=128)
    plan = plan_for(target, draft)
    layout = plan.kv_layout
    assert (layout.num_layers, layout.num_kv_heads, layout.key_dim, layout.keeps_nodes) == (1, 2, 16, True)
    assert plan.weight_bytes > 0.9 * (draft / "model.safetensors").stat().st_size / 2  # bfloat16, or float32
    assert plan.max_model_len == 128


@pytest.mark.parametrize(("asked", "draft_len", "expected"), [(None, 600, 512), (None, 100, 100), (64, 100, 64)])
def test_drafts_go_as_far_as_both_models(asked, draft_len, expected, target, tmp_path):
    draft = tiny_target(tmp_path, max_position_embeddings=draft_len)
    assert plan_for(target, draft, max_model_len=asked).max_model_len == expected


@pytest.mark.parametrize(("draft_len", "whose"), [(100, "the draft model takes 100"), (700, "the target takes 512")])
def test_more_than_a_model_takes_is_refused(draft_len, whose, target, tmp_path):
    draft = tiny_target(tmp_path, max_position_embeddings=draft_len)
    with pytest.raises(ConfigError, match=f"max_model_len=600, but {whose} tokens at most"):
        plan_for(target, draft, max_model_len=600)


def test_no_drafts_beyond_what_the_draft_takes(target, tmp_path):
    draft = noisy_copy(target, tmp_path, noise=0.0)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, "max_model_len": 24}
    prompt, params = [{"prompt_token_ids": list(range(10))}], SamplingParams(temperature=0, max_tokens=30)
    plain = LLM(str(target), **SETTINGS).generate(prompt, params, use_tqdm=False)
    llm = LLM(str(target), speculative_config=config, **SETTINGS)
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    counts = llm.get_metrics()
    (drafted,) = (metric.value for metric in counts if metric.name.endswith("num_draft_tokens"))
    assert 8 <= drafted <= 14, "24 tokens, of which 10 are the prompt"


class TestVocabulary:
    def test_padding_of_either_model_is_accepted(self, target, tmp_path):
        for size in (40, 64):
            draft = tiny_target(tmp_path / str(size), vocab_size=size, seed=1)
            words = [f"w{i}" for i in range(40)]
            for folder in (draft, with_tokenizer := tiny_target(tmp_path / f"target{size}")):
                save_tokenizer(folder, words)
            config = {"method": "draft_model", "model": str(draft), "draft_sample_method": "probabilistic"}
            llm = LLM(str(with_tokenizer), speculative_config=config, **SETTINGS)
            prompts = [{"prompt_token_ids": [41, 45, 3]}]  # only the target has the first token
            (plain,) = LLM(str(with_tokenizer), **SETTINGS).generate(
                prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
            )
            (output,) = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
            llm.generate(prompts * 3, SamplingParams(temperature=1.5, max_tokens=20, seed=1), use_tqdm=False)

    def test_other_tokens_are_named(self, target, tmp_path):
        words = [f"w{i}" for i in range(48)]
        draft, with_tokenizer = tiny_target(tmp_path / "draft"), tiny_target(tmp_path / "target")
        save_tokenizer(with_tokenizer, words)
        save_tokenizer(draft, [*words[:7], "other", *words[8:]])
        with pytest.raises(
            CompatibilityError, match=r"2 entries differ, the first at id 7 \('w7' in the target, 'other'"
        ):
            plan_for(with_tokenizer, draft)

    def test_it_is_the_engines_tokenizer_that_counts(self, tmp_path):
        words = [f"w{i}" for i in range(48)]
        draft, target, other = (tiny_target(tmp_path / name) for name in ("draft", "target", "other"))
        save_tokenizer(draft, words)
        save_tokenizer(target, [*words[:7], "other", *words[8:]])
        save_tokenizer(other, words)
        config = {"method": "draft_model", "model": str(draft)}
        with pytest.raises(CompatibilityError, match="2 entries differ"):
            dry_run(str(target), speculative_config=config)
        assert dry_run(str(target), tokenizer=str(other), speculative_config=config).plan.kv_layout is not None

    def test_another_size_without_tokenizers_is_refused(self, target, tmp_path):
        with pytest.raises(CompatibilityError, match=r"has 50 token ids and the target 48.*without both tokenizers"):
            plan_for(target, tiny_target(tmp_path, vocab_size=50))


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM

class MyConfig(LlamaConfig):
    model_type = "mine"

class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""
LOAD = """
import sys
from specdec_core import LLM, ConfigError

target, draft = sys.argv[1:]
config = {"method": "draft_model", "model": draft}
for is_trusted in (True, False):
    try:
        with LLM(target, trust_remote_code=is_trusted, skip_tokenizer_init=True, num_kv_blocks=64,
                 speculative_config=config) as llm:
            print("loaded")
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("whose", ["draft", "target and draft"])
def test_code_of_a_checkpoint_is_run_where_code_may_be_run(whose, target, tmp_path):
    draft = tiny_target(tmp_path / "draft")
    (draft / "mine.py").write_text(CUSTOM)
    config = json.loads((draft / "config.json").read_text())
    classes = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    (draft / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": classes}))
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", LOAD, target if whose == "draft" else draft, draft]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    trusted, untrusted = run.stdout.splitlines()
    assert trusted == "loaded"
    assert "trust_remote_code" in untrusted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "no/such/folder/here"}, "cannot be read"),
        ({"model": "any", "draft_sample_method": "beam"}, "draft_sample_method='beam'"),
        ({"model": "any", "speculative_token_tree": "[(1,)]"}, r"has the path \(1,\) without \(0,\)"),
        ({"model": "any", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2"),
        ({"model": "any", "adaptive_draft_length": 1}, "adaptive_draft_length=1 must be True or False"),
        ({"model": "any", "speculative_token_trees": "[(0,)]"}, "did you mean 'speculative_token_tree'"),
        (
            {"model": "any", "speculative_token_tree": "[(0,)]", "num_speculative_tokens": 2},
            "num_speculative_tokens=2, but speculative_token_tree has 1 nodes",
        ),
    ],
)
def test_wrong_options_are_explained(options, message, target):
    with pytest.raises(ConfigError, match=message):
        dry_run(str(target), speculative_config={"method": "draft_model", **options}, skip_tokenizer_init=True)


def test_a_quantization_that_is_not_installed_is_explained(target, tmp_path):
    draft = noisy_copy(target, tmp_path)
    with pytest.raises(ConfigError, match="quantization"):
        plan_for(target, draft, quantization="no_such_method")


def test_a_tree_says_how_many_tokens_to_draft():
    assert DraftConfig(model="any").default_num_speculative_tokens(torch.device("cpu")) == 5
    config = DraftConfig(model="any", speculative_token_tree=[(0,), (1,), (0, 0)])
    assert (config.default_num_speculative_tokens(torch.device("cpu")), config.shape(9).depth) == (3, 2)
    assert DraftConfig(model="any").shape(9) == TokenTree.chain(9)


def test_the_same_weights_are_accepted_whole(target, tmp_path):
    """If the draft model is the target, every draft token is accepted."""
    draft = noisy_copy(target, tmp_path, noise=0.0)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    llm = LLM(str(target), speculative_config=config, **SETTINGS)
    prompts = [{"prompt_token_ids": [7] * n} for n in (1, 5, 40)]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=21), use_tqdm=False):
        assert output.speculation.acceptance_length == 5


@pytest.mark.parametrize("window", [0, -3, 1.5, True, "8"])
def test_a_window_is_a_number_of_positions(window, target):
    with pytest.raises(ConfigError, match=f"draft_window={window!r}"):
        plan_for(target, target, draft_window=window)
    assert plan_for(target, target, draft_window=1).scratch_slots == plan_for(target, target).scratch_slots
