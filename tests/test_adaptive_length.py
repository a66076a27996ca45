"""Adaptive draft lengths on real text: fewer draft tokens are rejected, the cost per token falls, and outputs stay the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core import LLM, SamplingParams

PROMPTS = ["import os\n\nclass Tree:\n    def __init__(self", "The quick brown fox"]
ADAPTIVE = {"adaptive_draft_length": True, "draft_level_cost": 0.05, "draft_node_cost": 0.01}


def noisy_tiny(folder: Path, noise: float) -> str:
    """Save the embedded model with noise on its weights, and return its folder.

    noise: the standard deviation of the noise, relative to that of each weight tensor.
    """
    from specdec_model_tiny import model_path

    source, generator = Path(model_path()), torch.Generator().manual_seed(0)
    weights = load_file(source / "model.safetensors")
    for weight in weights.values():
        if weight.dim() == 2:
            weight += (noise * weight.float().std() * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


class Run:
    def __init__(self, temperature: float, max_tokens: int, **config: Any) -> None:
        with LLM("tiny", dtype="float32", speculative_config={"method": "draft_model", **config}) as llm:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            self.token_ids = [list(output.outputs[0].token_ids) for output in outputs]
            counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        self.drafted, self.accepted = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))

    @property
    def cost(self) -> float:
        """The cost of the run, in units of one forward pass of the target.

        It is the number of these forward passes, plus the configured cost (draft_level_cost + draft_node_cost) of each
        draft token.
        """
        num_passes = sum(map(len, self.token_ids)) - self.accepted
        return num_passes + (ADAPTIVE["draft_level_cost"] + ADAPTIVE["draft_node_cost"]) * self.drafted


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_less_is_wasted_and_it_pays(temperature, tmp_path):
    draft = {"model": noisy_tiny(tmp_path, 0.3), "num_speculative_tokens": 8}
    fixed, adaptive = Run(temperature, 160, **draft), Run(temperature, 160, **draft, **ADAPTIVE)
    assert adaptive.token_ids == fixed.token_ids
    wasted_before, wasted = fixed.drafted - fixed.accepted, adaptive.drafted - adaptive.accepted
    assert wasted < 0.5 * wasted_before
    assert adaptive.cost < fixed.cost


def test_drafts_that_are_noise_end(tmp_path):
    draft = {"model": noisy_tiny(tmp_path, 5.0), "num_speculative_tokens": 6}
    fixed, adaptive = Run(0.0, 40, **draft), Run(0.0, 40, **draft, **ADAPTIVE)
    assert adaptive.token_ids == fixed.token_ids
    assert adaptive.drafted < 0.15 * fixed.drafted
