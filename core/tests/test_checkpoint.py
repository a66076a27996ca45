"""Loading a draft checkpoint into a module: tensors are loaded by name, and one error lists all tensors that do not
fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec_core import Checkpoint, CompatibilityError, ConfigError
from specdec_core.models import checkpoint as checkpoint_module

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _save_parts(tensors: Tensors, folder: Path) -> None:
    names = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


SAVES: dict[str, Callable[[Tensors, Path], Any]] = {
    "safetensors": lambda tensors, folder: save_file(tensors, folder / "model.safetensors"),
    "archive": lambda tensors, folder: torch.save(tensors, folder / "pytorch_model.bin"),
    "old pickle": lambda tensors, folder: torch.save(
        tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "parts": _save_parts,
}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(3, 2), torch.nn.LayerNorm(2, bias=False)
        self.register_buffer("frequencies", torch.tensor([0.1, 1 / 3]), persistent=False)
        self.dtypes_moved: set[torch.dtype] = set()

    def to(self, *args: Any, **kwargs: Any) -> Small:
        self.dtypes_moved |= {parameter.dtype for parameter in self.parameters()}
        return super().to(*args, **kwargs)


def rename(published: str) -> str | None:
    return None if published.startswith("table.") else published.replace("fc.", "first.")


def published(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (2, 3), "fc.bias": (2,), "norm.weight": (2,)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**tensors, "table.ids": torch.arange(4)}


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_is_filled(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, module = published(), Small().train()
    SAVES[how](tensors, tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    with torch.device("meta"):
        checkpoint.check_shapes(Small(), rename)
    checkpoint.load_into(module, rename, dtype=dtype, device=CPU)
    others = checkpoint.load(["table.ids", "no such"])
    assert {*others} == {"table.ids"}
    assert others["table.ids"].tolist() == [0, 1, 2, 3]
    for name, tensor in tensors.items():
        if (ours := rename(name)) is not None:
            assert torch.equal(module.state_dict()[ours], tensor.to(dtype)), name
    assert module.dtypes_moved == {dtype}, "the device holds no larger copy"
    assert module.frequencies.dtype == torch.float32
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert {*Checkpoint(str(tmp_path)).load(tensors)} == {*checkpoint.load(tensors)} == {*tensors}, "again"


def _set(name: str, tensor: torch.Tensor | None) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor})


FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (_set("fc.bias", None), r"first.bias \[2\] is missing"),
    "unknown": (_set("gate", torch.zeros(7)), r"gate \[7\] is not known"),
    "misshapen": (_set("fc.weight", torch.zeros(3, 2)), r"fc.weight is \[3, 2\], not \[2, 3\]"),
    "twice": (_set("first.bias", torch.zeros(2)), r"is one tensor too many for first.bias"),
    "quantized": (_set("norm.weight", torch.zeros(2, dtype=torch.int8)), "quantized, or no .*: norm.weight"),
    "scaled": (
        _set("norm.weight", torch.zeros(2, dtype=torch.float8_e4m3fn)),
        "quantized, or no .*: norm.weight torch.float8_e4m3fn",
    ),
    "nan": (_set("norm.weight", torch.tensor([0.0, torch.nan])), "not finite in norm.weight"),
    "too large": (_set("fc.bias", torch.tensor([0.0, 1e39], dtype=torch.float64)), "cannot hold in fc.bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    tensors = published()
    change(tensors)
    SAVES["safetensors"](tensors, tmp_path)
    with pytest.raises(CompatibilityError, match=message) as caught:
        Checkpoint(str(tmp_path)).load_into(Small(), rename, dtype=torch.float32, device=CPU)
    assert str(tmp_path) in str(caught.value)
    of_shapes = fault in ("missing", "unknown", "misshapen", "twice")
    if of_shapes:
        with pytest.raises(CompatibilityError, match=message):
            Checkpoint(str(tmp_path)).check_shapes(Small(), rename)
    else:
        Checkpoint(str(tmp_path)).check_shapes(Small(), rename)


def test_a_missing_tensor_has_its_published_name(tmp_path: Path) -> None:
    tensors = published()
    FAULTS["missing"][0](tensors)
    SAVES["safetensors"](tensors, tmp_path)
    with pytest.raises(CompatibilityError, match=r"[:;] fc.bias \[2\] is missing"):
        Checkpoint(str(tmp_path)).outline(Small, rename, lambda name: name.replace("first.", "fc."))


def test_nan_is_no_value_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert Checkpoint(str(tmp_path)).config == {"time_step_limit": [0.0, float("inf")]}, "as in published ones"
    (tmp_path / "config.json").write_text('{"rms_norm_eps": NaN}')
    with pytest.raises(ConfigError, match=r"config.json cannot be read: NaN is no value"):
        _ = Checkpoint(str(tmp_path)).config


def test_several_faults_are_named_together(tmp_path: Path) -> None:
    tensors = published()
    for fault in ("missing", "unknown", "misshapen"):
        FAULTS[fault][0](tensors)
    SAVES["safetensors"](tensors, tmp_path)
    with pytest.raises(CompatibilityError, match=r"fc.weight .* not .*; first.bias .* missing; gate .* not known"):
        Checkpoint(str(tmp_path)).check_shapes(Small(), rename)


def test_a_file_that_is_cut_off_later_is_an_error_in_words(tmp_path: Path) -> None:
    SAVES["old pickle"](published(), tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    assert "fc.bias" in checkpoint.shapes
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.load(["fc.bias"])


@pytest.mark.parametrize("how", ["safetensors", "parts"])  # a pickle is opened for shapes alone first: on "meta"
def test_files_are_opened_once(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    for holder, name in ((checkpoint_module, "safe_open"), (torch, "load")):
        original = getattr(holder, name)

        def counted(file: Path, *args: Any, original: Any = original, **named: Any) -> Any:
            opened.append(file.name)
            return original(file, *args, **named)

        monkeypatch.setattr(holder, name, counted)
    SAVES[how](published(), tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.check_shapes(Small(), rename)
    checkpoint.load_into(Small(), rename, dtype=torch.float32, device=CPU)
    assert sorted({*opened}) == sorted(opened)
