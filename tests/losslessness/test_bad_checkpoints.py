"""The engine refuses a damaged checkpoint with an error that names the damage."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from transformers_log import log_to_stderr

from specdec_core import LLM, CompatibilityError, ConfigError, SpecdecError
from specdec_core.api.arguments import dry_run

SETTINGS = {"dtype": "float32", "skip_tokenizer_init": True}
Damage = Callable[[Path], object]


@pytest.fixture
def folder(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def config(**changes: Any) -> Damage:
    return rewritten("config.json", lambda text: json.dumps({**json.loads(text), **changes}).encode())


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


UP = "model.layers.1.mlp.up_proj.weight"
CONFIGS = {
    "no file": (lambda folder: (folder / "config.json").unlink(), ConfigError, "cannot be read.* Give a folder with"),
    "empty": (rewritten("config.json", lambda text: b""), ConfigError, "cannot be read.*not a valid JSON file"),
    "cut": (rewritten("config.json", lambda text: text[:40]), ConfigError, "cannot be read.*not a valid JSON file"),
    "a list": (rewritten("config.json", lambda text: b"[]"), ConfigError, r"config.json holds \[\], not an object"),
    "null": (rewritten("config.json", lambda text: b"null"), ConfigError, "config.json holds null, not an object"),
    "unknown family": (config(model_type="lama"), ConfigError, "cannot be read.*`lama`"),
    "text for a number": (config(vocab_size="200"), ConfigError, "cannot be read: vocab_size='200' must be a whole"),
    "negative size": (config(vocab_size=-1), ConfigError, "vocab_size=-1 must be a whole number from 1"),
    "no key heads": (config(num_key_value_heads=0), ConfigError, "num_key_value_heads=0 must be a whole number from 1"),
    "no layers": (config(num_hidden_layers=0), ConfigError, "num_hidden_layers=0 must be .* from 1 to 4096"),
    "too many layers": (config(num_hidden_layers=10**6), ConfigError, "num_hidden_layers=1000000 must be .* to 4096"),
    "no positions": (config(max_position_embeddings=0), ConfigError, "max_position_embeddings=0 must be .* from 2"),
    "key heads that do not divide": (
        config(num_key_value_heads=3),
        ConfigError,
        "num_key_value_heads=3 must divide num_attention_heads=4",
    ),
    "unknown activation": (config(hidden_act="silo"), CompatibilityError, "no 'silo', which a value in config.json"),
}


def without_a_part(folder: Path) -> None:
    """Damage a checkpoint: replace its weights file by an index of shards, one of which does not exist."""
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_an_index_without(key: str) -> Damage:
    def damage(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-1.safetensors")
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": names}
        del index[key]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


WEIGHTS = {
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), ConfigError, "weights .*model.safetensors"),
    "empty": (rewritten("model.safetensors", lambda data: b""), ConfigError, "weights .* header too small"),
    "junk": (rewritten("model.safetensors", lambda data: b"\xff" * 64), ConfigError, "weights .* header too large"),
    "cut": (rewritten("model.safetensors", lambda data: data[:-1]), ConfigError, "weights .* not fully covered"),
    "a part is missing": (without_a_part, ConfigError, "weights .*model-00001-of-00002.safetensors"),
    "half": (rewritten("model.safetensors", lambda data: data[: len(data) // 2]), ConfigError, "weights .* cannot be"),
}
TENSORS = {
    "integers": (
        weights(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})),
        CompatibilityError,
        rf"no quantization_config, but its weights are quantized, or no floating-point numbers: {UP} I8\. Use",
    ),
    "one is missing": (weights(lambda tensors: tensors.pop(UP)), CompatibilityError, rf"missing_keys.*{UP}"),
    "one of another shape": (
        weights(lambda tensors: tensors.update({UP: torch.ones(64, 128)})),
        CompatibilityError,
        rf"mismatched_keys.*{UP}.*\[64, 128\].*\[128, 64\]",
    ),
    "another width": (config(intermediate_size=80), CompatibilityError, r"mismatched_keys.*down_proj.*\[64, 80\]"),
    "a layer too many": (config(num_hidden_layers=4), CompatibilityError, r"missing_keys.*model\.layers\.3"),
    "another vocabulary": (config(vocab_size=201), CompatibilityError, r"mismatched_keys.*lm_head.*\[201, 64\]"),
    "an index without metadata": (
        with_an_index_without("metadata"),
        ConfigError,
        "'metadata' is missing in their index",
    ),
    "an index without names": (with_an_index_without("weight_map"), ConfigError, "'weight_map' is missing in their"),
    "a text to end with": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        CompatibilityError,
        "eos_token_id of the model's .* is 'x', and should be a token id",
    ),
    "not a number": (
        weights(lambda tensors: tensors["model.norm.weight"].fill_(float("nan"))),
        CompatibilityError,
        "computes no finite logits: its weights are broken",
    ),
}


@pytest.mark.parametrize("how", [LLM, dry_run])
@pytest.mark.parametrize(("damage", "error", "says"), [*CONFIGS.values(), *WEIGHTS.values()], ids=[*CONFIGS, *WEIGHTS])
def test_files(how: Any, damage: Damage, error: type[Exception], says: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(error, match=f"(?s){says}") as caught:
        how(str(folder), **SETTINGS)
    assert type(caught.value) is error
    assert str(folder) in str(caught.value) or error is CompatibilityError


@pytest.mark.parametrize(("damage", "error", "says"), TENSORS.values(), ids=TENSORS)
def test_weights_of_another_model(damage: Damage, error: type[Exception], says: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(error, match=says):
        LLM(str(folder), **SETTINGS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_kv_blocks": 10**9}, "num_kv_blocks=1000000000 blocks of .* do not fit into"),
        ({"num_kv_blocks": 1}, "1 KV blocks of 16 tokens .* do not hold one request"),
        ({"speculative_config": {"method": "eagle", "model": "nowhere"}}, "the draft model 'nowhere' is not a folder"),
    ],
)
def test_weights_are_read_last(options: dict[str, Any], says: str, folder: Path) -> None:
    """Loading refuses these weights, so any other error comes before."""
    damage, error, refusal = TENSORS["not a number"]
    damage(folder)
    with pytest.raises(error, match=refusal):
        LLM(str(folder), **SETTINGS)
    with pytest.raises(SpecdecError, match=says):
        LLM(str(folder), **{**SETTINGS, **options})


def with_unused_tensors(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)


def without_one_and_with_unused_tensors(tensors: dict[str, torch.Tensor]) -> None:
    with_unused_tensors(tensors)
    del tensors[UP]


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A function that returns what was printed since its last call."""
    log_to_stderr(monkeypatch)

    def read() -> str:
        return "".join(capfd.readouterr())

    return read


def test_tensors_that_the_model_does_not_use_are_not_reported(folder: Path, printed: Callable[[], str]) -> None:
    """They may be those of a multi-token prediction module, which a proposer reads."""
    weights(with_unused_tensors)(folder)
    reference.load(folder)
    assert "eh_proj.weight" in printed()  # transformers reports them
    LLM(str(folder), **SETTINGS).close()
    found = printed()
    assert "eh_proj.weight" not in found
    assert "LOAD REPORT" not in found
    reference.load(folder)
    assert "eh_proj.weight" in printed()


def test_a_missing_tensor_is_reported_beside_unused_ones(folder: Path, printed: Callable[[], str]) -> None:
    weights(without_one_and_with_unused_tensors)(folder)
    with pytest.raises(CompatibilityError, match=rf"missing_keys.*{UP}"):
        LLM(str(folder), **SETTINGS)
    assert UP in printed()


def test_a_pickle_that_runs_code_is_refused(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as stream:
        pickle.dump(Evil(), stream, protocol=2)
    with pytest.raises(ConfigError, match=r"hold more than tensors.*convert them to safetensors"):
        LLM(str(folder), **SETTINGS)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("how", [LLM, dry_run])
def test_a_revision_of_code_that_there_is_not(how: Any, folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"code_revision='x' is of a checkpoint's own code, and .* has none: leave it"
    ):
        how(str(folder), code_revision="x", **SETTINGS)
