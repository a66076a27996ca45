"""Weights go from the files straight to a (pretend) GPU, and are those that a CPU gets, bit for bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import EXPERTS, tiny_model
from torch.nn.modules.module import register_module_parameter_registration_hook

from specdec_core.models import placing
from specdec_core.models.load import ModelSource, load_config
from specdec_core.models.model import target_info_of
from specdec_core.models.split_load import load_part, plan_split
from specdec_core.models.split_modules import Part
from specdec_core.models.weights import load_weights
from specdec_testing.pretend_cuda import CUDA, PretendCuda

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "llama": (torch.float32, {}),
    "qwen2": (torch.bfloat16, {"tie_word_embeddings": True}),  # converted to float32
    "qwen3_moe": (torch.float32, EXPERTS),  # in the files, each expert is a tensor of its own
    "gemma3_text": (torch.bfloat16, {"rope_local_base_freq": 1e4}),  # two kinds of rotary frequencies
}

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def load(source: ModelSource, num_ranks: int) -> Any:
    config = load_config(source)
    if num_ranks == 1:
        return load_weights(source, config)
    info = target_info_of(source, config)
    return load_part(source, config, info, plan_split(source, config, info, Part.pretended(num_ranks)))


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize(
    ("family", "is_safe", "num_ranks"),
    [*((family, True, 1) for family in FAMILIES), ("llama", False, 1), ("qwen3_moe", True, 2)],
)
def test_no_weight_is_one_of_the_cpu_first(family: str, is_safe: bool, num_ranks: int, tmp_path: Path) -> None:
    dtype, options = FAMILIES[family]
    made = tiny_model(family, dtype, **options)
    made.save_pretrained(tmp_path)
    if not is_safe:
        (tmp_path / "model.safetensors").unlink()
        torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
    expected = tensors(load(ModelSource(model=tmp_path, device=CPU, dtype="float32"), num_ranks))
    places = set()

    def place(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            places.add(parameter.device.type)

    with PretendCuda() as pretend:
        hook = register_module_parameter_registration_hook(place)
        model = load(ModelSource(model=tmp_path, device=CUDA, dtype="float32"), num_ranks)
        hook.remove()
        assert places == {"meta", "cuda"}
        found = tensors(model)
        assert {tensor.device for tensor in found.values()} == {CUDA}
        assert {*found} == {*expected}
        for name, tensor in found.items():
            on_host = tensor.cpu()
            assert on_host.dtype == expected[name].dtype, name
            assert on_host.equal(expected[name]), name
        assert any("inv_freq" in name for name in found)
        storages = {each.data_on_cpu.data_ptr(): each.numel() for each in found.values()}
        assert sum(pretend.uploads) == sum(storages.values()), "each is moved once"
        assert not model.training


@pytest.mark.parametrize(
    ("name", "stand_in", "reason"),
    [
        ("is_dataclass", lambda given: False, "_load_pretrained_model gets no options with an empty device_map"),
        ("hasattr", lambda base, name: False, "it has no _load_pretrained_model"),
    ],
)
def test_the_log_says_why_weights_are_on_the_host_first(
    name: str,
    stand_in: Any,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with PretendCuda(), caplog.at_level(logging.INFO, logger=placing.__name__):
        load(ModelSource(model=tmp_path, device=CUDA, dtype="float32"), 1)
        assert not caplog.messages
        monkeypatch.setattr(placing, name, stand_in, raising=False)
        model = load(ModelSource(model=tmp_path, device=CUDA, dtype="float32"), 1)
        assert {tensor.device for tensor in tensors(model).values()} == {CUDA}
    (said,) = caplog.messages
    assert said.startswith("weights of LlamaForCausalLM are loaded to the host's memory before they are moved")
    assert said.endswith(reason)


def test_a_checkpoint_with_code_of_its_own(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(OWN_CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with PretendCuda():
        model = load(
            ModelSource(model=tmp_path, device=CUDA, dtype="float32", trust_remote_code=True, code_revision="main"), 1
        )
        assert type(model).__name__ == "OwnForCausalLM"
        assert {each.device for each in tensors(model).values()} == {CUDA}
