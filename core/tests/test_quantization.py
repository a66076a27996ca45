"""Quantization by transformers: accepted methods are passed on, refused ones are named in the error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rounding_quantizer import MISSING, rounding_quantizer
from transformers.quantizers import auto

from specdec_core import LLM, CapacityError, ConfigError, DraftHeadConfig, SamplingParams
from specdec_core.api.arguments import dry_run
from specdec_core.engine import memory
from specdec_core.models.quantization import quantization_config

METHODS = sorted({*auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"})


@pytest.fixture
def quantized(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose config.json has a quantization_config."""
    folder = tmp_path / "quantized"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "rounding_test"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def rounding() -> Iterator[list[str]]:
    with rounding_quantizer() as ran:
        yield ran


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("asked", "ran"),
    [("rounding_test", "made 2"), ({"quant_method": "rounding_test", "bits": 1}, "made 1")],
    ids=str,
)
def test_quantized_on_load(checkpoint: Path, rounding: list[str], asked: Any, ran: str) -> None:
    llm = LLM(checkpoint, quantization=asked, dtype="float32")
    assert rounding == [ran]
    assert tokens(llm)
    objects = LLM(checkpoint, quantization=quantization_config(asked, llm.engine.target._model.config.__class__()))
    assert rounding == [ran, ran]
    assert tokens(objects)


def test_weights_that_may_fit_once_they_are_quantized_are_tried(
    checkpoint: Path, rounding: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much smaller a quantizer makes the weights is known only to itself."""
    free_bytes = (checkpoint / "model.safetensors").stat().st_size // 2
    monkeypatch.setattr(memory, "free_memory", lambda device: (free_bytes, 2**30))
    options = {"dtype": "float32", "max_model_len": 32, "num_kv_blocks": 2}
    with pytest.raises(CapacityError, match="bytes of target weights do not fit"):
        LLM(checkpoint, **options)
    with LLM(checkpoint, quantization="rounding_test", **options) as llm:
        assert tokens(llm)
    assert rounding


@pytest.mark.parametrize("asked", [None, "rounding_test"])
def test_a_quantized_checkpoint_loads_by_itself(quantized: Path, rounding: list[str], asked: Any) -> None:
    assert tokens(LLM(quantized, quantization=asked, dtype="float32"))
    assert rounding == ["read 2"]


@pytest.mark.parametrize("asked", ["fp8", {"quant_method": "awq"}, {"load_in_4bit": True}], ids=str)
def test_a_name_that_is_not_the_checkpoint_s(quantized: Path, rounding: list[str], asked: Any) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is quantized with 'rounding_test': leave it out"):
        LLM(quantized, quantization=asked)


@pytest.mark.filterwarnings("ignore")  # of transformers, about one method or another
@pytest.mark.parametrize("method", METHODS)
def test_whatever_a_method_lacks_here_is_a_config_error(checkpoint: Path, method: str) -> None:
    """A quantization method runs, or raises ConfigError if a package, hardware, option or calibration is missing.

    If `dry_run` raises an error, loading raises the same one.
    """
    said = refusal(dry_run, checkpoint, quantization=method)
    at_load = refusal(lambda: tokens(LLM(checkpoint, quantization=method)))
    assert said in (None, at_load)


def refusal(load: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    try:
        load(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"quant_method": "custom_evil"}, "quant_method='custom_evil', which transformers does not know"),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\], which transformers does not know"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes', which transformers does not know"),
        ({"bits": 4}, "quant_method=None, which transformers does not know"),
        ({}, "quant_method=None, which transformers does not know"),
        ("text", "its quantization_config is 'text', not a mapping with a quant_method"),
        ([1], r"its quantization_config is \[1\], not a mapping"),
        (7, "its quantization_config is 7, not a mapping"),
        (True, "its quantization_config is True, not a mapping"),
    ],
    ids=str,
)
def test_a_quantization_that_transformers_does_not_know(quantized: Path, written: Any, says: str) -> None:
    """An unknown quant_method is refused, because transformers would load the weights as if they were not quantized."""
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = written
    (quantized / "config.json").write_text(json.dumps(config))
    for load in (dry_run, LLM):
        for keywords in ({}, {"quantization": "fp8"}):
            with pytest.raises(ConfigError, match=says) as caught:
                load(quantized, **keywords)
            said = str(caught.value)
            assert f"the checkpoint {str(quantized)!r} cannot be loaded as it is quantized" in said
            assert "Supported are aqlm, auto-round, awq" in said
            assert "take quantization_config out of config.json" in said


def test_a_checkpoint_that_says_nothing_of_its_quantization(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = None
    (quantized / "config.json").write_text(json.dumps(config))
    assert tokens(LLM(quantized, dtype="float32"))


def test_what_is_missing_is_found_before_weights_are_loaded(
    checkpoint: Path, quantized: Path, rounding: list[str]
) -> None:
    asked = {"quant_method": "rounding_test", "bits": 0}
    for load in (dry_run, LLM):
        said = refusal(load, checkpoint, quantization=asked)
        assert said == (
            f"quantization={asked} cannot be used for the model {str(checkpoint)!r} here: the package {MISSING} is "
            f"missing. Install it (pip install {MISSING}), or choose another quantization or checkpoint; 'int8' and "
            f"'int4' run on a CPU"
        )
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["bits"] = 0
    (quantized / "config.json").write_text(json.dumps(config))
    for load in (dry_run, LLM):
        said = refusal(load, quantized)
        assert said is not None
        assert (
            f"the checkpoint's quantization 'rounding_test' cannot be used for the model {str(quantized)!r} here: the "
            f"package {MISSING} is missing"
        ) in said
        assert "run on a CPU" not in said, "the checkpoint has chosen"
    assert rounding == []


INT8_OR_INT4 = "'int8' and 'int4' run on a CPU"


@pytest.mark.filterwarnings("ignore")  # of torchao, about torch
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("bitsandbytes", "leaves load_in_8bit or load_in_4bit open: give a mapping that has it"),
        ("bitsandbytes_4bit", "leaves load_in_8bit or load_in_4bit open"),
        ("gptq", r"leaves bits open: give a mapping that has it, as {'quant_method': 'gptq', 'bits': ...}"),
        ({"quant_method": "gptq"}, r"leaves bits open.*" + INT8_OR_INT4),
        ("torchao", "leaves quant_type open"),
        ("awq", "for checkpoints whose weights were calibrated and saved with 'awq', and .* is not quantized.*"),
        ({"quant_method": "awq"}, "a quantization that needs no calibration; " + INT8_OR_INT4),
        (
            "fp8",
            r"the package accelerate is missing. Install it \(pip install accelerate\), or choose.*" + INT8_OR_INT4,
        ),
        ("fp_quant", "transformers says 'FPQuant quantization is only supported on GPU.*'. Choose another"),
        ("int3", "is not known: give 'int8', 'int4', the name of a method of transformers \\(aqlm, .*vptq\\)"),
        ({"quant_method": "torchao", "quant_type": 3}, "values that transformers does not accept"),
        (5, "names no quant_method"),
        ({}, "names no quant_method"),
    ],
    ids=str,
)
def test_what_is_refused_is_explained(checkpoint: Path, asked: Any, message: str) -> None:
    """Errors are specdec's own, not those of transformers' constructors, which name what a user cannot pass."""
    if asked == "fp8" and find_spec("accelerate") is not None:
        pytest.skip("accelerate is installed")
    with pytest.raises(ConfigError, match=message) as caught:
        dry_run(checkpoint, quantization=asked)
    assert not re.search("pre_quantized|__init__|Error: |KeyError|Unknown quantization type", str(caught.value))


def test_a_head_s_refusal_says_what_can_be_quantized() -> None:
    with pytest.raises(ConfigError, match="not for draft heads, which have the target's dtype: leave it out") as caught:
        DraftHeadConfig(model="head", quantization="int8")
    assert "The target can be quantized (the engine's quantization), and whole draft models" in str(caught.value)
