"""A model's outline (its description and sizes, found without loading weights) equals that of the loaded model."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, UNSUPPORTED, save_family
from rounding_quantizer import rounding_quantizer

from specdec_core import LLM, CompatibilityError, ConfigError, SamplingParams
from specdec_core.models import Model, meta_load as module
from specdec_core.models.activations import activation_bytes
from specdec_core.models.load import ModelSource, load_config
from specdec_core.models.meta_load import outline
from specdec_core.models.model import backbone_of
from specdec_core.models.weights import load_weights

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16"]
NEEDS_VALUES = {"positions that are counted", "time steps that only prompts limit"}
"""Keys of UNSUPPORTED that only a model with weights reveals."""


def loaded_bytes(folder: Path, dtype: str) -> int:
    source = ModelSource(model=folder, device=CPU, dtype=dtype)
    model = load_weights(source, load_config(source))
    return sum({id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize(("name", "dtype"), list(zip(FAMILIES, cycle(DTYPES), strict=False)))
def test_the_outline_is_that_of_the_loaded_model(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown: list[Exception] = []
    monkeypatch.setattr(module, "_takes_values", lambda error: unknown.append(error) or True)
    folder = save_family(name, tmp_path)
    options = {"device": CPU, "dtype": dtype, "max_model_len": 96}  # what llama4 does to longer ones is refused
    target, found = Model(ModelSource(model=folder, **options)), outline(ModelSource(model=folder, **options))
    assert (found.info, found.kv_groups) == (target.info, target.kv_groups)
    # families keep a few biases in float32, whatever the model's type
    assert found.weight_bytes == pytest.approx(loaded_bytes(folder, dtype), rel=1e-4)
    assert not unknown or name == "llama4_text"  # whose masks depend on padding
    # The outline runs in bfloat16, where norms and routers copy to float32; in float32, this counts too much.
    really = activation_bytes(backbone_of(target._model, target._layer_modules), target._layer_modules)
    assert 0.9 * really <= found.activation_bytes <= 2 * really


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - NEEDS_VALUES))
def test_what_is_refused_is_refused_without_weights(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    with pytest.raises(CompatibilityError) as refused:
        Model(ModelSource(model=folder, device=CPU))
    with pytest.raises(CompatibilityError) as refused_unseen:
        outline(ModelSource(model=folder, device=CPU))
    assert str(refused_unseen.value) == str(refused.value)


def test_code_that_looks_at_values_is_said_to_be_the_reason(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "jetmoe", vocab_size=120, hidden_size=64, num_hidden_layers=2, num_key_value_heads=4, kv_channels=16,
        intermediate_size=64, num_local_experts=4, max_position_embeddings=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError, match=r"cannot be planned without its weights.*It may run nevertheless"):
        outline(ModelSource(model=tmp_path, device=CPU))
    with LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=16) as llm:
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_family("llama", tmp_path)


def test_options_are_those_of_the_target(llama: Path) -> None:
    found = outline(ModelSource(model=llama, device=CPU, dtype="float16", max_model_len=40))
    assert (found.info.max_model_len, found.info.dtype, found.kv_layout.dtype) == (40, torch.float16, torch.float16)
    with pytest.raises(ConfigError, match="max_model_len=257"):
        outline(ModelSource(model=llama, device=CPU, max_model_len=257))
    with pytest.raises(ConfigError, match="quantization='nothing'"):
        outline(ModelSource(model=llama, device=CPU, quantization="nothing"))


def test_quantized_weights_are_as_large_as_their_files(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "rounding_test"}
    (llama / "config.json").write_text(json.dumps(config))
    with rounding_quantizer():
        found = outline(ModelSource(model=llama, device=CPU))
        assert found.weight_bytes == (llama / "model.safetensors").stat().st_size


def sharded(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_shards(llama: Path) -> None:
    whole = outline(ModelSource(model=llama, device=CPU))
    assert outline(ModelSource(model=sharded(llama), device=CPU)) == whole


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "there are no weights in"),
        (lambda folder: cut(folder / "model.safetensors"), "cannot be loaded: SafetensorError"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be loaded: SafetensorError"),
        (lambda folder: next(sharded(folder).glob("model-*")).unlink(), "cannot be loaded: FileNotFoundError"),
        (
            lambda folder: (sharded(folder) / "model.safetensors.index.json").write_text("{}"),
            "is missing in their index",
        ),
    ],
)
def test_weight_files_that_cannot_be_read(llama: Path, damage: Any, says: str) -> None:
    damage(llama)
    with pytest.raises(ConfigError, match=says):
        outline(ModelSource(model=llama, device=CPU))
