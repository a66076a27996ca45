"""Which models run as fused layers. That they generate what transformers generates with them is in test_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from families import FAMILIES, save_family

from specdec_core import LLM, DecoderStack, SamplingParams
from specdec_core.contracts.kv import KVMetadata, Visibility
from specdec_core.ops.attention_plan import AttentionPlan
from specdec_core.ops.padding import Padding

lanes = pytest.importorskip("specdec_kernels.cpu.lanes")
pytestmark = pytest.mark.skipif(not lanes.is_supported(torch.float32), reason="this CPU lacks AVX2 or FMA")

FUSED = {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_the_common_kind_are_fused_and_no_others(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, dtype=dtype, disable_log_stats=True)
    assert (llm.engine.target.decoder is not None) == (family in FUSED)


CHANGES = {
    "residual": lambda layer, given, out: out + 0.01 * given,
    "norm of the result": lambda layer, given, out: layer.input_layernorm(out),
    "scale": lambda layer, given, out: 1.01 * out,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_does_something_else_is_not_fused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls in these layers, or all but one, are Llama's; what the layer returns is not."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def changed(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return CHANGES[change](self, hidden_states, forward(self, hidden_states, *args, **kwargs))

    folder = save_family("llama", tmp_path)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, dtype="float32", disable_log_stats=True)
    assert llm.engine.target.decoder is None


def test_positions_past_the_length_limit_do_no_harm() -> None:
    """A draft model forwards nodes there, which are dead, if another request's draft is deeper."""
    decoder = LLM("tiny", max_model_len=64, dtype="float32", disable_log_stats=True).engine.target.decoder

    class Alone:
        """Runs the layers on two tokens, each the first of its request, at any position."""

        def run_layers(self, run: Any, start: int, end: int, hidden: Any, ropes: Any, positions: Any, **_: Any) -> Any:
            heads, width = decoder.run._layers[0].num_kv_heads, decoder.run._layers[0].head_dim
            caches = [(torch.zeros(3, heads, width), torch.zeros(3, heads, width)) for _ in range(start, end)]
            metadata = KVMetadata((0, 0), (1, 1), torch.tensor([[0], [1]]), torch.arange(2), 1)
            plan = AttentionPlan(metadata, Visibility(positions, torch.ones(2, dtype=torch.int64)), Padding(1, 1))
            return run(hidden, ropes, positions, caches, torch.arange(2), plan, None)

    def forward(positions: list[int]) -> torch.Tensor:
        found, _ = evolve(decoder, attention=Alone()).forward(
            torch.tensor([5, 6]), torch.tensor(positions), torch.arange(2)
        )
        return found

    expected, found = forward([3, 63]), forward([3, 64 + 7])
    assert found.isfinite().all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "config", [{"method": name, "eagle_topk": 1} for name in ("eagle", "eagle3")] + [{"method": "mtp"}]
)
def test_the_layers_of_heads_are_fused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [], DecoderStack.forward

    def counted(self: Any, hidden: Any, *args: Any, **others: Any) -> Any:
        calls.append(len(hidden))
        return forward(self, hidden, *args, **others)

    monkeypatch.setattr(DecoderStack, "forward", counted)
    llm = LLM("tiny", speculative_config={**config, "num_speculative_tokens": 3})
    llm.generate(["x = 1\n" * 40], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(calls) >= 6
    assert max(calls) > 64, "prompts, too"
