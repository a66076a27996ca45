"""The config classes of the engine and of speculative decoding: their keys and their hashes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, field, fields, frozen

from specdec_core import ConfigError, DraftModelConfig, DraftTreeConfig, EngineConfig, SpeculativeConfig, whole_number
from specdec_core.api.arguments import speculative_mapping


@frozen(kw_only=True)
class CopyConfig:
    """Options of a method without a draft model."""

    longest: int = field(default=4, validator=whole_number(1))


@frozen(kw_only=True)
class HeadConfig(DraftModelConfig):
    """Options of a method with a draft model."""

    num_heads: int = field(default=3, validator=whole_number(1))


def speculative(method_config: type = CopyConfig, **keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_mapping({"method": "mine", "num_speculative_tokens": 5, **keys}, method_config)


@pytest.mark.parametrize("key", ["num_speculative_tokens", "disable_by_batch_size"])
@pytest.mark.parametrize(
    ("value", "message"),
    [(True, "truth value"), ("5", "text"), (2.5, "not an integer"), (0, "small"), (-1, "small"), (2**16 + 1, "large")],
)
def test_numbers_that_make_no_sense(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value!r} .*{message}.* from 1 to 65536"):
        speculative(**{key: value})


FLAGS = {"enforce_eager", "disable_padded_drafter_batch"}


@pytest.mark.parametrize("key", sorted({attribute.name for attribute in fields(DraftModelConfig)} - FLAGS))
def test_keys_of_draft_models_are_refused_by_methods_without_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f"no key '{key}': the method takes no draft model"):
        speculative(**{key: "x"})


@pytest.mark.parametrize(
    "keys",
    [{attribute.name: None} for attribute in fields(DraftModelConfig)]
    + [{"draft_tensor_parallel_size": 1}, {"enforce_eager": False}, *({key: True} for key in sorted(FLAGS))],
    ids=str,
)
def test_keys_of_draft_models_that_ask_for_nothing_are_taken_by_all_methods(keys: dict[str, Any]) -> None:
    assert speculative(**keys) == speculative()


@pytest.mark.parametrize(
    ("key", "value"), [*((key, 1) for key in sorted(FLAGS)), ("draft_tensor_parallel_size", 2), ("model", "")]
)
def test_other_values_of_such_keys_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        speculative(**{key: value})


def test_the_method_says_how_many_tokens_to_draft() -> None:
    for answer in (None, 0, "5"):
        with pytest.raises(ConfigError, match="num_speculative_tokens="):
            SpeculativeConfig.from_mapping({"method": "mine"}, CopyConfig, None, lambda options, found=answer: found)


def test_a_method_with_a_draft_model_has_its_keys() -> None:
    options = speculative(HeadConfig, model="./heads", num_heads=2, max_model_len=512).options
    assert (options.model, options.num_heads, options.max_model_len) == ("./heads", 2, 512)
    with pytest.raises(ConfigError, match=r"not complete: .*'model'"):
        speculative(HeadConfig)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=3 is not supported: give 1, 2 or 4"):
        speculative(HeadConfig, model="x", draft_tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="did you mean 'num_heads'"):
        speculative(HeadConfig, model="x", num_head=2)


def test_an_option_with_the_name_of_a_core_key_does_not_hide_it() -> None:
    @frozen
    class Hiding:
        disable_by_batch_size: int = 3

    found = speculative(Hiding, disable_by_batch_size=7)
    assert (found.disable_by_batch_size, found.options) == (7, Hiding())


@pytest.mark.parametrize(
    "written",
    [{"method": "[copy]"}, {"model": "[copy]"}, {"method": None, "model": "[copy]"}, {"method": "copy"}],
    ids=str,
)
def test_a_method_in_brackets(written: dict[str, Any]) -> None:
    assert speculative_mapping({**written, "longest": 2}) == {"method": "copy", "longest": 2}


def test_two_methods() -> None:
    with pytest.raises(ConfigError, match=r"two methods, 'copy' and '\[other\]'"):
        speculative_mapping({"method": "copy", "model": "[other]"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"runner": "pooling"}, "runner='pooling' is not known: give 'auto' or 'generate'"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral' is not known"),
        ({"enforce_eager": 1}, "enforce_eager=1"),
        ({"disable_log_stats": "no"}, "disable_log_stats='no'"),
        ({"metrics_prefix": ""}, "metrics_prefix=''"),
        ({"metrics_prefix": "a:b"}, "metrics_prefix='a:b'"),
        ({"revision": ""}, "revision=''"),
        ({"revision": 3}, "revision=3"),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"device": 0}, "device=0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not supported: give 1, 2 or 4"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"model": ""}, "model=''"),
        ({"seed": "1"}, "seed='1'"),
    ],
    ids=str,
)
def test_engine_keys_out_of_range(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_mapping({"model": "m", **keys})


def test_names_of_dtypes() -> None:
    import torch

    names = {given: EngineConfig(model="m", dtype=given).dtype for given in ("half", "float", "bfloat16", "auto")}
    assert names == {"half": "float16", "float": "float32", "bfloat16": "bfloat16", "auto": "auto"}
    assert EngineConfig(model="m", dtype=torch.float16).dtype == "float16"


CHANGES = [
    {"kv_manager": "prefix"},
    {"kv_manager_config": {"a": 1}},
    {"model": "other"},
    {"revision": "v2"},
    {"code_revision": "v2"},
    {"dtype": "float32"},
    {"device": "cpu"},
    {"quantization": "fp8"},
    {"quantization": {"quant_method": "fp8", "bits": 8}},
    {"max_model_len": 100},
    {"max_num_seqs": 3},
    {"max_num_batched_tokens": 100},
    {"block_size": 32},
    {"trust_remote_code": True},
    {"enforce_eager": True},
    {"tensor_parallel_size": 2},
]
NO_CHANGES = [
    {"seed": 3},
    {"metrics_prefix": "vllm"},
    {"disable_log_stats": True},
    {"tokenizer_revision": "v2"},
    {"tokenizer_mode": "slow"},
    {"runner": "generate"},
    {"num_kv_blocks": 7},
    {"gpu_memory_utilization": 0.5},
]


def test_the_hash_covers_what_changes_the_computation_and_nothing_else() -> None:
    plain = EngineConfig(model="m")
    changed = [evolve(plain, **change).compute_hash() for change in CHANGES]
    assert len({plain.compute_hash(), *changed}) == len(CHANGES) + 1
    assert {evolve(plain, **change).compute_hash() for change in NO_CHANGES} == {plain.compute_hash()}
    covered = {key for change in (*CHANGES, *NO_CHANGES) for key in change}
    assert covered == {attribute.name for attribute in fields(EngineConfig)}
    assert EngineConfig(model=Path("m"), dtype="auto").compute_hash() == plain.compute_hash()


def test_the_hash_of_a_speculative_config() -> None:
    plain = speculative()
    others = [
        speculative(num_speculative_tokens=6),
        speculative(disable_by_batch_size=3),
        speculative(longest=5),
        speculative(method="yours"),
        speculative(HeadConfig, model="x"),
        speculative(HeadConfig, model="y"),
    ]
    assert len({plain.compute_hash(), *(other.compute_hash() for other in others)}) == len(others) + 1
    assert speculative(longest=4).compute_hash() == plain.compute_hash()
    padded = speculative(HeadConfig, model="x", disable_padded_drafter_batch=True)
    assert padded.compute_hash() == speculative(HeadConfig, model="x").compute_hash()


def test_the_hash_of_a_checkpoint_is_of_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, copy = tmp_path / "head", tmp_path / "elsewhere" / "copy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    shutil.copytree(folder, copy)

    def hashes(model: Any) -> list[str]:
        return [
            speculative(HeadConfig, model=model).compute_hash(),
            EngineConfig(model=model).compute_hash(),
        ]

    first = hashes(folder)
    assert hashes(str(folder) + "/.") == first
    assert hashes(copy) == first
    monkeypatch.chdir(tmp_path)
    assert hashes("head") == first
    (copy / ".cache").write_text("hidden")
    (copy / "drafts").mkdir()
    assert hashes(copy) == first
    (copy / "model.safetensors").write_bytes(bytes([1, *range(1, 256)]))
    assert not set(hashes(copy)) & set(first), "a weight has changed"
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    (copy / "other.safetensors").write_bytes(bytes(range(256)))
    assert not set(hashes(copy)) & set(first), "a file has another name"
    assert not set(hashes("a/repository")) & set(hashes("b/repository"))


def test_a_checkpoint_that_cannot_be_read_has_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read for a hash: Permission denied"):
        EngineConfig(model=tmp_path).compute_hash()


def test_the_hash_is_the_same_in_another_process() -> None:
    code = """
from specdec_core import EngineConfig
print(EngineConfig(model="m", quantization={"b": set("abcdefgh"), "a": (1, 2)}, dtype="half").compute_hash())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    here = EngineConfig(model="m", quantization={"a": (1, 2), "b": set("hgfedcba")}, dtype="float16")
    assert run.stdout.strip() == here.compute_hash()


def test_what_has_no_stable_form_is_not_hashed() -> None:
    with pytest.raises(ConfigError, match="no stable form"):
        EngineConfig(model="m", quantization={"object": object()}).compute_hash()


def test_a_chain_has_an_end():
    DraftTreeConfig().check(4096)
    with pytest.raises(
        ConfigError, match="num_speculative_tokens=4097, but drafts of a model or head have at most 4096"
    ):
        DraftTreeConfig().check(4097)
