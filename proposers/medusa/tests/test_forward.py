"""Tests that Medusa heads of all published layouts give the same logits as the reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import build_proposer, target_info
from tiny_medusa import HIDDEN_SIZE, LAYOUTS, OF_THE_TARGET, VOCAB_SIZE, Layout, write_medusa

from specdec_proposer_medusa import loading, module
from specdec_proposer_medusa.module import MedusaHeads

Patch = pytest.MonkeyPatch
BATCH = 3
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def differences(folder: Path, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Write heads, build the proposer, and compute the logits of all heads for a batch. Returns by how much they differ
    from the reference's, [batch, num_heads]."""
    heads = write_medusa(folder, layout, dtype)
    hidden = torch.randn(BATCH, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    expected = torch.stack([heads.logits(row)[:, heads.ids] for row in hidden])
    assert expected.isfinite().all()
    lm_head = heads.lm_head.to(dtype)
    proposer = build_proposer(
        "medusa",
        target_info(VOCAB_SIZE, HIDDEN_SIZE, dtype),
        num_speculative_tokens=3,
        model=folder,
        output_head=(lambda hidden: hidden @ lm_head.T) if layout.output == "the target's" else None,
    )
    with torch.inference_mode():
        found = torch.stack([proposer._logits(i, hidden) for i in range(layout.heads)], dim=1)
    assert found.dtype == dtype
    to_target = torch.arange(VOCAB_SIZE) if proposer._q_to_target is None else proposer._q_to_target
    assert torch.equal(to_target, heads.ids)
    return (found - expected).abs().amax(dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_the_reference(name, dtype, tmp_path):
    assert float(differences(tmp_path, LAYOUTS[name], dtype).max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_exact_as_its_weights(dtype, tmp_path):
    found = differences(tmp_path, LAYOUTS["medusa-vicuna-7b-v1.3"], dtype)
    assert 0 < float(found.max()) < {torch.float16: 0.05, torch.bfloat16: 0.4}[dtype]  # logits are around 5


def the_head_before_is_used(patch: Patch) -> None:
    hidden = MedusaHeads.hidden
    patch.setattr(MedusaHeads, "hidden", lambda self, i, *args: hidden(self, max(0, i - 1), *args))


def the_output_layer_of_the_head_before_is_used(patch: Patch) -> None:
    logits = MedusaHeads.logits
    patch.setattr(MedusaHeads, "logits", lambda self, i, *args: logits(self, max(0, i - 1), *args))


def biases_are_left_out(patch: Patch) -> None:
    def hidden(self: Any, i: int, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.heads[i]:
            hidden = hidden + module.silu(hidden @ layer.weight.T)
        return hidden

    patch.setattr(MedusaHeads, "hidden", hidden)


def nothing_is_added_to_the_input(patch: Patch) -> None:
    def hidden(self: Any, i: int, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.heads[i]:
            hidden = module.silu(layer(hidden))
        return hidden

    patch.setattr(MedusaHeads, "hidden", hidden)


def the_last_layer_is_left_out(patch: Patch) -> None:
    def hidden(self: Any, i: int, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.heads[i][:-1]:
            hidden = hidden + module.silu(layer(hidden))
        return hidden

    patch.setattr(MedusaHeads, "hidden", hidden)


def another_activation(patch: Patch) -> None:
    patch.setattr(module, "silu", torch.nn.functional.gelu)


def rows_are_those_of_another_request(patch: Patch) -> None:
    hidden = MedusaHeads.hidden
    patch.setattr(MedusaHeads, "hidden", lambda self, i, rows: hidden(self, i, rows.roll(1, 0)))


def the_scale_is_left_out(patch: Patch) -> None:
    patch.setattr(MedusaHeads, "logits", lambda self, i, hidden: self.lm_heads[i](hidden))


def the_first_rows_are_kept(patch: Patch) -> None:
    keep = MedusaHeads.keep_tokens
    patch.setattr(MedusaHeads, "keep_tokens", lambda self, ids: keep(self, torch.arange(len(ids))))


def the_target_has_the_layers_output(patch: Patch) -> None:
    patch.setattr(MedusaHeads, "hidden", lambda self, i, hidden: hidden)


def biases_are_not_read(patch: Patch) -> None:
    patch.setattr(loading.Checkpoint, "load_into", _without_biases(loading.Checkpoint.load_into))


def _without_biases(load_into: Any) -> Any:
    def changed(self: Any, heads: MedusaHeads, *args: Any, **more: Any) -> None:
        load_into(self, heads, *args, **more)
        for name, parameter in heads.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()

    return changed


MISTAKES = [
    (the_head_before_is_used, "medusa-vicuna-7b-v1.3"),
    (the_head_before_is_used, "vLLM, lm_head"),
    (the_output_layer_of_the_head_before_is_used, "medusa-vicuna-7b-v1.3"),
    (biases_are_left_out, "medusa-vicuna-7b-v1.3"),
    (biases_are_not_read, "vLLM, biases"),
    (nothing_is_added_to_the_input, "vllm-medusa-vicuna-7b-v1.3"),
    (the_last_layer_is_left_out, "two layers"),
    (another_activation, "safetensors"),
    (rows_are_those_of_another_request, "no layers"),
    (the_scale_is_left_out, "vLLM, scaled"),
    (the_first_rows_are_kept, "vLLM, some tokens of all"),
    (the_target_has_the_layers_output, OF_THE_TARGET),
]


@pytest.mark.parametrize(
    ("mistake", "name"), MISTAKES, ids=[f"{mistake.__name__}, {name}" for mistake, name in MISTAKES]
)
def test_mistakes_are_noticed(mistake, name, tmp_path, monkeypatch):
    mistake(monkeypatch)
    assert float(differences(tmp_path, LAYOUTS[name], torch.float32).max()) > 10 * TOLERANCE[torch.float32]


def test_a_token_map_that_was_sorted_is_noticed(tmp_path, monkeypatch):
    load = loading.Checkpoint.load
    monkeypatch.setattr(
        loading.Checkpoint,
        "load",
        lambda self, names: {
            name: tensor.sort().values if name.endswith("token_map") else tensor
            for name, tensor in load(self, names).items()
        },
    )
    with pytest.raises(AssertionError):
        differences(tmp_path, LAYOUTS["vLLM, some tokens"], torch.float32)
