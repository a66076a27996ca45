"""The real vLLM, if SPECDEC_VLLM_PYTHON is the Python of an environment that has it and specdec-vllm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from specdec_core import Checkpoint, resolve_model

PYTHON = os.environ.get("SPECDEC_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SPECDEC_VLLM_PYTHON does not name the Python of a vLLM")
LOOP = [40, 41, 42, 43] * 9
REQUESTS = [
    [0, "first", LOOP, 90, None],
    [0, "its twin", LOOP, 90, None],
    [0, "aborted", [50, 51, *LOOP], 90, 8],
    [9, "in its place", [60, 61, 62] * 12, 80, None],
    [9, "with its prompt", [50, 51, *LOOP], 60, None],
    [14, "late", [*range(70, 90)] * 2, 70, None],
]
BRIDGE = {"method": "custom_class", "model": "specdec_vllm.Proposer", "num_speculative_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without its MTP module, which vLLM's Llama refuses."""
    source, folder = Checkpoint(resolve_model("tiny")), tmp_path_factory.mktemp("model")
    config = {key: value for key, value in source.config.items() if key != "num_nextn_predict_layers"}
    extra = f"layers.{config['num_hidden_layers']}."
    tensors = source.load([name for name in source.shapes if extra not in name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(model: Path, speculative_config: Any, num_blocks: int, **environment: str) -> dict[str, Any]:
    settings = {"model": str(model), "speculative_config": speculative_config, "num_blocks": num_blocks}
    command = [PYTHON, str(Path(__file__).with_name("run_in_vllm.py")), json.dumps(settings | {"requests": REQUESTS})]
    result = subprocess.run(
        command, env=os.environ | environment, cwd=model, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Any]:
    return run(model, None, num_blocks=64)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_outputs_are_those_of_vllm_alone(method, model, plain, tmp_path):
    """Requests of equal text, prompts in chunks (64 tokens a step), an abort, a new request in the place of the
    aborted one, and preemptions: 10 blocks of 32 tokens are too few for four requests."""
    cache = tmp_path / "outputs"
    options = {"suffix_decoding_cache_path": str(cache)} if method == "suffix" else {"prompt_lookup_max": 4}
    found = run(
        model, BRIDGE, num_blocks=10, SPECDEC_VLLM_PROPOSER=method, SPECDEC_VLLM_CONFIG=json.dumps(options)
    )  # fmt: skip
    aborted = found["outputs"].pop("aborted")
    assert plain["outputs"]["aborted"][: len(aborted)] == aborted[: len(plain["outputs"]["aborted"])]
    assert found["outputs"] == {name: ids for name, ids in plain["outputs"].items() if name != "aborted"}
    assert found["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 50
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert cache.exists() == (method == "suffix")  # written when vLLM ended


def test_a_wrong_option_ends_vllm_with_the_reason(model):
    with pytest.raises(AssertionError, match="'promt_lookup_max': did you mean 'prompt_lookup_max'"):
        run(model, BRIDGE, 64, SPECDEC_VLLM_PROPOSER="ngram", SPECDEC_VLLM_CONFIG='{"promt_lookup_max": 4}')
