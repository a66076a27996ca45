"""Norms and rotary embeddings of transformers models are replaced by given operations if these compute the same
results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_families import EXPERTS, LATENT, PARTIAL, logits, tiny_model
from torch import nn

from specdec_core.models.fused_ops import RMSNorm, replace_parts
from specdec_core.ops import REFERENCE


class Recording:
    """Wraps core's reference operations, which stand in for a plugin's operations, and counts their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.ops = {name: self._recorded(name) for name in REFERENCE}

    def _recorded(self, name: str) -> Callable[..., Any]:
        def operation(*given: Any) -> Any:
            self.calls[name] += 1
            return REFERENCE[name](*given)

        return operation


NEOX = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
CASES: list[tuple[str, dict[str, Any], tuple[int, int], tuple[int, int]]] = [
    # Two layers: norms and rotations in one forward pass in float32, and in bfloat16.
    ("llama", {}, (5, 2), (5, 2)),
    ("qwen3", {}, (9, 2), (9, 2)),
    ("mixtral", EXPERTS, (5, 2), (5, 2)),
    ("deepseek_v3", LATENT, (9, 0), (9, 0)),  # pairs of neighbors are rotated
    ("deepseek_v3", LATENT | {"rope_interleave": False}, (9, 2), (9, 2)),
    ("phi3", {}, (5, 2), (5, 2)),
    ("phi3", PARTIAL, (5, 0), (5, 0)),
    ("glm4", {}, (9, 0), (9, 0)),
    ("gpt_neox", NEOX, (0, 2), (0, 2)),  # LayerNorm
    ("gpt_neox", {}, (0, 0), (0, 0)),
    ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4}, (0, 0), (0, 0)),
    ("gemma2", {}, (0, 2), (0, 2)),  # weights count from 1
    ("olmo2", {}, (9, 2), (0, 0)),  # rounded at other places
    ("gpt_oss", EXPERTS, (5, 0), (0, 0)),
    ("cohere", {"use_qk_norm": True}, (0, 0), (0, 0)),
    ("cohere2", {}, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("model_type", "options", "in_float32", "in_bfloat16"), CASES, ids=str)
def test_families(model_type: str, options: dict, in_float32: tuple, in_bfloat16: tuple, dtype: torch.dtype) -> None:
    model, recording = tiny_model(model_type, dtype, **options), Recording()
    before = logits(model)
    replace_parts(model, recording.ops)
    recording.calls.clear()
    assert torch.equal(logits(model), before)
    expected = in_float32 if dtype == torch.float32 else in_bfloat16
    assert (recording.calls["rms_norm"], recording.calls["rotary"]) == expected


def test_other_models_keep_what_they_have() -> None:
    from transformers.models.llama import modeling_llama

    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    recording = Recording()
    replace_parts(tiny_model("llama"), recording.ops)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    recording.calls.clear()
    logits(tiny_model("llama"))
    assert not recording.calls


def test_the_reference_replaces_nothing() -> None:
    model = tiny_model("llama")
    modules = list(model.modules())
    replace_parts(model, REFERENCE)
    assert list(model.modules()) == modules
    assert not any("forward" in vars(module) for module in modules)


class Norm(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(shape), requires_grad=False), 1e-5

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return REFERENCE["rms_norm"](hidden, self.weight, self.eps)


class Gated(Norm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden if gate is None else hidden * gate)


class Failing(Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("rows come by sixes")


@pytest.mark.parametrize(
    ("norm", "is_replaced"), [(Norm(), True), (Norm((2, 4)), False), (Gated(), False), (Failing(), False)], ids=str
)
def test_norms_that_take_more_or_other_things_stay(norm: nn.Module, is_replaced: bool) -> None:
    model = nn.Sequential(norm)
    replace_parts(model, Recording().ops)
    assert isinstance(model[0], RMSNorm) == is_replaced


def test_a_forward_that_someone_replaced_before_stays() -> None:
    model, recording = tiny_model("llama"), Recording()
    attention = model.model.layers[0].self_attn
    attention.forward = own = partial(attention.forward)
    replace_parts(model, recording.ops)
    assert attention.forward is own
    logits(model)
    assert recording.calls["rotary"] == 1  # the other layer's
