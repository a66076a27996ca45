"""Tests of quantized draft models: options and errors are as for a quantized target, and the output is that of plain
decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from noisy_copy import noisy_copy
from rounding_quantizer import MISSING, rounding_quantizer

from specdec_core import LLM, ConfigError, SamplingParams, cli
from specdec_core.api.arguments import dry_run
from specdec_testing import tiny_target

SETTINGS = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 32, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    return noisy_copy(target, tmp_path / "draft", noise=0.02)


@pytest.fixture
def rounding() -> Iterator[list[str]]:
    with rounding_quantizer() as ran:
        yield ran


def options(draft: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, **more}


def check_output(target: Path, draft: Path, **more: Any) -> list[int]:
    """Check that the output with this draft model equals that of plain decoding, greedy and sampled.

    Returns the number of accepted draft tokens of each prompt, first with greedy decoding, then with sampling.
    """
    prompts = [{"prompt_token_ids": [(7 * n + i) % 48 for i in range(n)]} for n in (1, 5, 40)]
    llms = LLM(str(target), **SETTINGS), LLM(str(target), speculative_config=options(draft, **more), **SETTINGS)
    num_accepted = []
    for temperature in (0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
        plain, found = (llm.generate(prompts, params, use_tqdm=False) for llm in llms)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
        num_accepted += [each.speculation.num_accepted for each in found]
    assert sum(num_accepted) > 10
    return num_accepted


def quantize_config(draft: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((draft / "config.json").read_text()) | {"quantization_config": quantization}
    (draft / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("asked", "ran"),
    [("rounding_test", "made 2"), ({"quant_method": "rounding_test", "bits": 4}, "made 4")],
    ids=str,
)
def test_quantized_on_load(asked: Any, ran: str, target: Path, draft: Path, rounding: list[str]) -> None:
    accepted = check_output(target, draft, quantization=asked)
    assert rounding == [ran], "the draft alone"
    assert accepted != check_output(target, draft)


def test_a_quantized_checkpoint_needs_no_key(target: Path, draft: Path, rounding: list[str]) -> None:
    quantize_config(draft, {"quant_method": "rounding_test", "bits": 4})
    check_output(target, draft)
    assert rounding == ["read 4"]
    with pytest.raises(ConfigError, match="the checkpoint is quantized with 'rounding_test': leave it out"):
        LLM(str(target), speculative_config=options(draft, quantization="fp8"), **SETTINGS)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_what_is_missing_is_said_before_weights_are_loaded(
    is_quantized: bool, target: Path, draft: Path, rounding: list[str]
) -> None:
    asked = {"quant_method": "rounding_test", "bits": 0}
    if is_quantized:
        quantize_config(draft, asked)
    config = options(draft) if is_quantized else options(draft, quantization=asked)
    messages = []
    for load in (dry_run, LLM):
        with pytest.raises(ConfigError) as caught:
            load(str(target), speculative_config=config, **SETTINGS)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"cannot be used for the model {str(draft)!r} here: the package {MISSING} is missing" in messages[0]
    assert f"Install it (pip install {MISSING}), or choose another quantization or checkpoint" in messages[0]


def test_check_says_it_too(target: Path, draft: Path, tmp_path: Path, rounding: list[str]) -> None:
    config = {"model": str(target), "skip_tokenizer_init": True, "speculative_config": options(draft)}
    config["speculative_config"]["quantization"] = {"quant_method": "rounding_test", "bits": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(cli.main, ["check", "--config", str(tmp_path / "config.json")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert MISSING in result.stderr.replace("\n", " ")
    assert rounding == []


def weight_types(llm: LLM) -> set[str]:
    """Return the names of the tensor classes that hold the weights of the draft model's linear layers, without the LM
    head."""
    model = llm.engine._speculation.drafters[0].proposer.proposer._model._model
    return {type(layer.weight).__name__ for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)}


EMBEDDED = {"model": "tiny", "dtype": "bfloat16", "max_model_len": 128, "num_kv_blocks": 64}
PROMPTS = ["def fib(n):\n    ", "import os\n\nclass Reader:\n    def __init__(self", "def merge(left, right):\n"]


def generated(of_draft: str | None, *, draft: bool = True, **options: Any) -> tuple[list[list[int]], float, LLM]:
    """Returns the outputs of the embedded model for PROMPTS, the acceptance length and the engine.

    of_draft: the draft's quantization. draft: whether there is one. options: of the engine.
    """
    speculative = {"method": "draft_model", "num_speculative_tokens": 4, "quantization": of_draft}
    llm = LLM(**EMBEDDED, speculative_config=speculative if draft else None, **options)
    params = SamplingParams(temperature=0, max_tokens=32)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    num_accepted = sum(each.speculation.num_accepted for each in outputs if draft)
    num_drafts = sum(each.speculation.num_drafts for each in outputs if draft)
    return [each.outputs[0].token_ids for each in outputs], 1 + num_accepted / max(1, num_drafts), llm


@pytest.mark.filterwarnings("ignore")  # of torchao, about torch
class TestNames:
    """The draft model of the embedded model, with int8 and int4 weights on a CPU. Skipped without torchao."""

    @pytest.fixture(scope="class", autouse=True)
    def torchao(self) -> None:
        pytest.importorskip("torchao", exc_type=ImportError)

    @pytest.fixture(scope="class")
    def plain(self) -> list[list[int]]:
        return generated(None, draft=False)[0]

    @pytest.fixture(scope="class")
    def unquantized_length(self) -> float:
        return generated(None)[1]

    @pytest.mark.parametrize("name", ["int8", "int4"])
    def test_the_output_is_that_of_plain_decoding(
        self, name: str, plain: list[list[int]], unquantized_length: float, tmp_path: Path
    ) -> None:
        found, length, llm = generated(name)
        assert found == plain
        print(f"acceptance length {length:.2f} with {name}, {unquantized_length:.2f} without")  # noqa: T201
        assert 0.7 * unquantized_length < length < 1.4 * unquantized_length
        assert "Parameter" not in weight_types(llm)

        model = llm.engine._speculation.drafters[0].proposer.proposer._model._model
        config = {**EMBEDDED, "speculative_config": {"method": "draft_model", "quantization": name}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = ["check", "--config", str(tmp_path / "config.json"), "--json"]
        result = CliRunner().invoke(cli.main, arguments)
        planned = json.loads(result.stdout)["memory"]["draft_weight_bytes"]
        assert planned == tensor_bytes(model)
        assert planned < 0.9 * (Path(model.config.name_or_path) / "model.safetensors").stat().st_size

    def test_a_target_that_is_quantized_with_its_draft_is_noticed(self, plain: list[list[int]]) -> None:
        assert generated("int4", quantization="int4")[0] != plain


def tensor_bytes(model: torch.nn.Module) -> int:
    """The bytes that a model's tensors take, those within quantized tensors among them."""

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        names = getattr(tensor, "__tensor_flatten__", lambda: ([], None))()[0]
        return [part for name in names for part in parts(getattr(tensor, name))] or [tensor]

    found = [part for tensor in (*model.parameters(), *model.buffers()) for part in parts(tensor)]
    return sum({part.data_ptr(): part.nbytes for part in found}.values())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torchao, about torch
class TestTorchao:
    """Draft models with torchao's own configs, on a CPU. Skipped without torchao."""

    @pytest.fixture(params=["int8", "int8_dynamic", "int4"])
    def chosen(self, request: pytest.FixtureRequest) -> Any:
        quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
        from transformers import TorchAoConfig

        return TorchAoConfig(
            {
                "int8": quantization.Int8WeightOnlyConfig,
                "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
                "int4": lambda: quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(16)),
            }[request.param]()
        )

    def test_quantized_on_load(self, chosen: Any, target: Path, draft: Path) -> None:
        check_output(target, draft, quantization=chosen)
        llm = LLM(str(target), speculative_config=options(draft, quantization=chosen), **SETTINGS)
        assert not weight_types(llm) & {"Parameter", "Tensor"}

    def test_as_a_mapping(self, chosen: Any, target: Path, draft: Path) -> None:
        mapping = json.loads(json.dumps(chosen.to_dict()))
        check_output(target, draft, quantization={key: mapping[key] for key in ("quant_method", "quant_type")})

    def test_a_quantized_checkpoint(self, chosen: Any, target: Path, draft: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        saved = tmp_path / "saved"
        AutoModelForCausalLM.from_pretrained(draft, quantization_config=chosen, dtype=torch.float32).save_pretrained(
            saved
        )
        check_output(target, saved)
