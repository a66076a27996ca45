"""Taps: the hidden states of the target that a proposer asks for and receives."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_core import LLM, ConfigError, PluginError, Plugins, SamplingParams
from specdec_core.models import Model
from specdec_core.models.load import ModelSource
from specdec_testing import tiny_target

NUM_LAYERS = 3
PROMPT = [3, 5, 7, 11, 13]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS)


def observed(folder, taps):
    seen = []
    config = {"method": "watching", "num_speculative_tokens": 1, "taps": taps, "seen": seen}
    plugins = Plugins.load(modules=["watching_proposer"])
    with LLM(folder, plugins=plugins, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64,
             speculative_config=config) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return [*PROMPT, *output.outputs[0].token_ids], seen


@torch.no_grad()
def test_they_are_the_residual_stream_before_each_layer_and_after_the_last(folder):
    taps = [*(f"input.{i}" for i in range(NUM_LAYERS + 1)), "final"]
    token_ids, seen = observed(folder, taps)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    entering: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    expected = dict(zip(taps, [*states[:-1], *entering, states[-1]], strict=True))
    for tap in taps:
        found = torch.cat([features[tap] for features in seen])
        assert len(found) >= len(PROMPT)
        torch.testing.assert_close(found, expected[tap][0, : len(found)], msg=tap, atol=1e-4, rtol=1e-4)


def test_layers_that_are_not_there_have_none(folder):
    with pytest.raises(ConfigError, match=r"tap 'input.4' is not known: give 'final' or 'input.i' with i from 0 to 3"):
        observed(folder, ["input.4"])


def test_rows_of_the_output_layer_are_asked_for_in_the_plan(folder):
    target = Model(ModelSource(model=folder, device=torch.device("cpu"), dtype="float32"))
    with pytest.raises(PluginError, match="its Plan does not have output_rows=True"):
        target.output_rows(torch.tensor([1]))
