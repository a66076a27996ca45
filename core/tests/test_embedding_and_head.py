"""A draft model that shares the target's embedding and LM head gets exactly the target's own values."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from specdec_core.errors import CompatibilityError
from specdec_core.models import Model
from specdec_core.models.embedding_and_head import EmbeddingAndHead, raw_logits, table_rows
from specdec_core.models.load import ModelSource

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 7.0},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16},
    "cohere2": {"head_dim": 16, "logit_scale": 0.25},
    "minicpm3": {
        "dim_model_base": 16,
        "scale_emb": 4.0,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
SCALES = {  # factor of the embedding outside its module; before the LM head; of the logits; softcap
    "llama": (1.0, 1.0, 1.0, None),
    "granite": (3.0, 1.0, 1 / 7, None),
    "gemma2": (1.0, 1.0, 1.0, 5.0),
    "gemma3_text": (1.0, 1.0, 1.0, None),
    "cohere2": (1.0, 1.0, 0.25, None),
    "minicpm3": (1.0, 0.25, 1.0, None),
    "gpt2": (1.0, 1.0, 1.0, None),
    "opt": (1.0, 1.0, 1.0, None),
}
TABLE_SCALES = {"granite": 3.0, "gemma2": 8.0, "gemma3_text": 8.0, "minicpm3": 4.0}
"""Factors from a row of the embedding table to the embedded token, applied within its module or outside."""
OFFSETS = {"gpt2": 0, "opt": 2}  # of the first position in the table of learned ones
TOKEN_IDS = torch.tensor([[5, 99, 3, 3, 118, 64, 0, 7, 31]])


def save(family: str, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(torch.float32).save_pretrained(folder)
    return folder


@attrs.frozen(eq=False)
class Stock:
    """Reference values that transformers computes for TOKEN_IDS, one row per token.

    first_input: the input of the first layer. learned_positions: the learned position embeddings, or 0 if the model has
    none. final: the hidden states that enter the LM head.
    """

    first_input: torch.Tensor
    learned_positions: torch.Tensor | int
    final: torch.Tensor
    logits: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, folder: Path, dtype: torch.dtype) -> Stock:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        output = model(TOKEN_IDS, output_hidden_states=True, use_cache=False)
        states = output.hidden_states
        tables = [m for name, m in model.named_modules() if name.endswith(("wpe", "embed_positions"))]
        positions = sum(table.weight[OFFSETS[model.config.model_type] :][: TOKEN_IDS.shape[1]] for table in tables)
        return cls(states[0][0], positions, states[-1][0], output.logits[0])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_as_the_model_computes_them(family: tuple[str, Path], dtype: torch.dtype) -> None:
    target = Model(ModelSource(model=family[1], device=torch.device("cpu"), dtype=dtype))
    stock = Stock.of(family[1], dtype)
    embedded = target.embed(TOKEN_IDS[0]) + stock.learned_positions
    logits = target.output_head(stock.final)
    assert (embedded.dtype, logits.dtype) == (stock.first_input.dtype, stock.logits.dtype)
    torch.testing.assert_close(embedded, stock.first_input)
    torch.testing.assert_close(logits, stock.logits)


def check_raw(name: str, folder: Path, dtype: torch.dtype) -> None:
    """Assert that `Model.embed` and `Model.output_head` with raw=True leave out exactly the model family's scaling and
    softcap."""
    target = Model(ModelSource(model=folder, device=torch.device("cpu"), dtype=dtype))
    stock = Stock.of(folder, dtype)
    head_scale, logits_scale, cap = SCALES[name][1:]
    embedded, raw = target.embed(TOKEN_IDS[0]), target.embed(TOKEN_IDS[0], raw=True)
    assert raw.dtype == embedded.dtype == dtype
    scale = torch.tensor(TABLE_SCALES.get(name, 1.0), dtype=dtype)
    torch.testing.assert_close(raw * scale, embedded)
    torch.testing.assert_close(raw, target._embedding.weight[TOKEN_IDS[0]], atol=0, rtol=0)
    logits = target.output_head(stock.final * head_scale, raw=True) * logits_scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, target.output_head(stock.final))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_raw_ends_are_without_what_the_family_adds(family: tuple[str, Path], dtype: torch.dtype) -> None:
    check_raw(*family, dtype)


@pytest.mark.parametrize("end", ["embed", "output_head"])
@torch.inference_mode()
def test_raw_ends_that_are_scaled_are_noticed(
    end: str, family: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """check_raw detects an `embed` or `output_head` that ignores raw=True."""
    name = family[0]
    original = getattr(Model, end)
    monkeypatch.setattr(Model, end, lambda self, given, raw=False: original(self, given))
    scaled = name in TABLE_SCALES if end == "embed" else SCALES[name][1:] != (1.0, 1.0, None)
    with pytest.raises(AssertionError) if scaled else nullcontext():
        check_raw(*family, torch.float32)


def test_without_an_output_head_there_is_none_to_share() -> None:
    with pytest.raises(CompatibilityError, match="no LM head"):
        raw_logits(None, torch.zeros(1, 4))


def test_an_embedding_of_another_kind_is_taken_at_its_word() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
            return 2.0 * token_ids[:, None]

    assert table_rows(Doubled(), torch.tensor([3])).tolist() == [[6.0]]


@torch.inference_mode()
def test_rows_of_the_output_head_make_its_logits(family: tuple[str, Path]) -> None:
    target, stock = (
        Model(ModelSource(model=family[1], device=torch.device("cpu"), dtype="float32")),
        Stock.of(family[1], torch.float32),
    )
    head, token_ids = target._model.get_output_embeddings(), torch.tensor([[7, 0], [119, 7]])
    if SCALES[family[0]][3] is not None:
        with pytest.raises(CompatibilityError, match="logits are not products with rows"):
            target._factors.rows(head)(token_ids)
        return
    rows = target._factors.rows(head)(token_ids)
    assert rows.shape == (2, 2, SIZES["hidden_size"])
    torch.testing.assert_close(rows @ stock.final[0], stock.logits[0][token_ids])
    if family[0] == "llama":
        has_bias = torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"])
        with pytest.raises(CompatibilityError, match="logits are not products with rows"):
            target._factors.rows(has_bias)(token_ids)


def test_what_is_found_is_what_the_family_does(family: tuple[str, Path]) -> None:
    name, folder = family
    factors = Model(ModelSource(model=folder, device=torch.device("cpu"), dtype="float32"))._factors
    found = (factors.embedding_scale, factors.head_scale, factors.logits_scale, factors.logits_cap)
    assert found == pytest.approx(SCALES[name])


@pytest.mark.parametrize("unknown", ["head_scale", "logits_scale"])
def test_what_was_not_recognized_is_refused(unknown: str) -> None:
    factors = attrs.evolve(
        EmbeddingAndHead(embedding_scale=1.0, head_scale=1.0, logits_scale=1.0, logits_cap=None), **{unknown: None}
    )
    with pytest.raises(CompatibilityError, match="LM head of its own"):
        factors.logits(torch.nn.Linear(4, 4), torch.zeros(1, 4))
