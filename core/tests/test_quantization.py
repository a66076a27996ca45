"""Quantisation is transformers' own: what it does not accept is reported by name, what it does is passed on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.quantizers import HfQuantizer, auto

from specdec_core import LLM, ConfigError, SamplingParams
from specdec_core.target.quantization import quantization_config

METHODS = sorted({*auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"})


@pytest.fixture
def quantized(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that says it is quantised."""
    folder = tmp_path / "quantized"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "rounding_test"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def rounding() -> Iterator[list[str]]:
    """A method registered with transformers, which rounds every weight. Yields the modes it ran in."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    ran: list[str] = []

    @auto.register_quantization_config("rounding_test")
    class RoundingConfig(QuantizationConfigMixin):
        def __init__(self, bits: int = 2, **kwargs: Any) -> None:
            self.quant_method, self.bits = "rounding_test", bits

    @auto.register_quantizer("rounding_test")
    class Rounding(HfQuantizer):
        requires_calibration = False
        is_trainable = False

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return False

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            ran.append(f"{'read' if self.pre_quantized else 'made'} {self.quantization_config.bits}")
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_((weight * 2**self.quantization_config.bits).round() / 2**self.quantization_config.bits)
            return model

    yield ran
    del auto.AUTO_QUANTIZATION_CONFIG_MAPPING["rounding_test"]
    del auto.AUTO_QUANTIZER_MAPPING["rounding_test"]


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("asked", "ran"),
    [("rounding_test", "made 2"), ({"quant_method": "rounding_test", "bits": 1}, "made 1")],
    ids=str,
)
def test_quantised_on_load(checkpoint: Path, rounding: list[str], asked: Any, ran: str) -> None:
    llm = LLM(checkpoint, quantization=asked, dtype="float32")
    assert rounding == [ran]
    assert tokens(llm)
    objects = LLM(checkpoint, quantization=quantization_config(asked, llm.engine.target._model.config.__class__()))
    assert rounding == [ran, ran]
    assert tokens(objects)


@pytest.mark.parametrize("asked", [None, "rounding_test"])
def test_a_quantised_checkpoint_loads_by_itself(quantized: Path, rounding: list[str], asked: Any) -> None:
    assert tokens(LLM(quantized, quantization=asked, dtype="float32"))
    assert rounding == ["read 2"]


@pytest.mark.parametrize("asked", ["fp8", {"quant_method": "awq"}, {"load_in_4bit": True}], ids=str)
def test_a_name_that_is_not_the_checkpoint_s(quantized: Path, rounding: list[str], asked: Any) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is quantised with 'rounding_test': leave it out"):
        LLM(quantized, quantization=asked)


@pytest.mark.filterwarnings("ignore")  # of transformers, about one method or another
@pytest.mark.parametrize("method", METHODS)
def test_whatever_a_method_lacks_here_is_a_config_error(checkpoint: Path, method: str) -> None:
    """A package, a machine, a choice or a calibrated checkpoint; where nothing is missing, it runs."""
    try:
        llm = LLM(checkpoint, quantization=method)
    except ConfigError:
        return
    assert tokens(llm)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("bitsandbytes", "is not known, or leaves something to choose"),
        ("bitsandbytes_4bit", "does not say how many bits: .*load_in_4bit"),
        ("gptq", "leaves something to choose: .*bits"),
        ("int3", "is not known"),
        (5, "names no quant_method"),
        ({}, "names no quant_method"),
        ({"quant_method": "gptq"}, "bits"),
    ],
    ids=str,
)
def test_what_is_left_to_say(checkpoint: Path, asked: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, quantization=asked)
