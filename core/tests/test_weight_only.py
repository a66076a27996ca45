"""The quantizations int8 and int4: sizes that are planned without weights, and what is refused. Skipped without
torchao, but for its error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_core import ConfigError
from specdec_core.models import meta_load
from specdec_core.models.load import ModelSource, load_config
from specdec_core.models.meta_load import outline
from specdec_core.models.weight_only import SCHEMES, refuse_device
from specdec_core.models.weights import load_weights

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao, about torch


def save_llama(folder: Path, *, hidden: int = 64, inner: int = 96, heads: int = 4) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=hidden // heads, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def real_bytes(source: ModelSource) -> int:
    """The bytes that the tensors of a loaded model take, counted by storage."""

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        names = getattr(tensor, "__tensor_flatten__", lambda: ([], None))()[0]
        return [part for name in names for part in parts(getattr(tensor, name))] or [tensor]

    model = load_weights(source, load_config(source))
    found = [part for tensor in (*model.parameters(), *model.buffers()) for part in parts(tensor)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in found}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_planned_size_is_that_of_the_loaded_weights(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    folder = save_llama(tmp_path)
    source = ModelSource(model=folder, device=CPU, dtype=dtype, quantization=name)
    real = real_bytes(source)
    assert outline(source).weight_bytes == real
    assert real < 0.75 * outline(ModelSource(model=folder, device=CPU, dtype=dtype)).weight_bytes
    with monkeypatch.context() as patch:
        patch.setattr(meta_load, "quantize_empty", lambda model, *args: model)
        patch.setattr(meta_load, "refuse_unquantized", lambda *args: None)
        assert outline(source).weight_bytes != real, "a plan that leaves out the quantization"


def test_layers_that_do_not_fit_int4_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    # 104 outputs are no multiple of 16, and as inputs none of 32
    source = ModelSource(model=save_llama(tmp_path, inner=104), device=CPU, dtype="float32", quantization="int4")
    model = load_weights(source, load_config(source), attn_implementation="eager")
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj.weight).__name__ == "Int4OpaqueTensor"
    assert {type(each.weight) for each in layer.mlp.children() if hasattr(each, "weight")} == {torch.nn.Parameter}
    assert outline(source).weight_bytes == real_bytes(source)
    assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_a_model_that_nothing_of_fits_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    folder = save_llama(tmp_path, hidden=24, inner=40, heads=2)
    source = ModelSource(model=folder, device=CPU, dtype="float32", quantization="int4")
    for load in (outline, lambda source: load_weights(source, load_config(source))):
        with pytest.raises(ConfigError, match=r"quantization='int4' changes nothing in the model .* multiple of 32"):
            load(source)


@pytest.mark.parametrize("name", SCHEMES)
def test_without_torchao_the_extra_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == "torchao"] or ["torchao"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "specdec_core.models.torchao_int4", raising=False)
    source = ModelSource(model=save_llama(tmp_path), device=CPU, quantization=name)
    with pytest.raises(ConfigError) as caught:
        outline(source)
    assert f"quantization='{name}' needs torchao, which is missing here or has another version" in str(caught.value)
    assert "install torchao in the version of specdec-core's extra `quantization`, or leave quantization out" in str(
        caught.value
    )


def test_int4_is_for_a_cpu() -> None:
    refuse_device("int4", CPU)
    refuse_device("int8", torch.device("cuda:1"))
    refuse_device({"quant_method": "fp8"}, torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="quantization='int4' runs on a CPU only, not on 'cuda:1': give 'int8'"):
        refuse_device("int4", torch.device("cuda:1"))
