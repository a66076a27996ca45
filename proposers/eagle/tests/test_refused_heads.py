"""Tests of the errors for EAGLE heads that are damaged, not whole or do not fit the target."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import put
from planned_heads import SETTINGS, SIZES, Change, changed, planned
from tiny_heads import BIN, SAFETENSORS, write_eagle, write_eagle3
from tiny_weights import Shape, Target

from specdec_core import LLM, CompatibilityError, ConfigError, SpecdecError

MISFITS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (put("fc.weight", None), r"fc.weight \[32, 96\] is missing"),
    "an extra one": (put("fd.weight", torch.zeros(3)), r"fd.weight \[3\] is not known"),
    "a misshapen one": (put("norm.weight", torch.zeros(31)), r"norm.weight is \[31\], not \[32\]"),
    "several": (
        lambda config, tensors: (tensors.pop("norm.weight"), tensors.pop("midlayer.mlp.up_proj.weight")),
        r"layers.0.mlp.up_proj.weight \[48, 32\] is missing; norm.weight \[32\] is missing",
    ),
    "integers": (
        lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}),
        "fc.weight torch.int8",
    ),
    "no table": (put("d2t", None), r"no d2t \[20\] with their ids"),
    "a table of another length": (
        put("d2t", torch.zeros(19, dtype=torch.int64)),
        r"has the shape \[19\], but lm_head.weight needs \[20\]",
    ),
    "a table beyond the target": (
        put("d2t", torch.full((20,), 40)),
        "does not map to different ids below 48",
    ),
    "a table with repetitions": (put("d2t", -torch.arange(20)), "does not map to different ids below 48"),
    "a table of fractions": (
        put("d2t", torch.arange(20) + 0.7),
        "float32 .* does not map to different ids below 48",
    ),
    "a layer without a number": (put("layers.x.weight", torch.zeros(3)), r"layers.x.weight \[3\] is not known"),
    "a layer far away": (
        put("layers.999999.weight", torch.zeros(3)),
        r"layers.999999.weight \[3\] is not known",
    ),
    "layers that are no list": (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=4),
        "reads the inputs of layers 4",
    ),
    "nested layers that are no list": (
        lambda config, tensors: config.update(eagle_config={"eagle_aux_hidden_state_layer_ids": 4}),
        "reads the inputs of layers 4",
    ),
    "no mapping": (lambda config, tensors: config.update(eagle_config=5), "eagle_config of .* is 5"),
    "an unknown activation": (lambda config, tensors: config.update(hidden_act="loud"), "is not valid: .*loud"),
    "layers that the target lacks": (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        r"reads the inputs of layers \[2, 4, 9\], and must read a list of numbers from 0 to 8",
    ),
    "other heads": (lambda config, tensors: config.update(num_attention_heads=8), "k_proj.weight is"),
    "sizes that make no sense": (
        lambda config, tensors: config.update(hidden_size=-3),
        "is not valid: hidden_size=-3 must",
    ),
    "no attention heads": (
        lambda config, tensors: config.update(num_attention_heads=0),
        "is not valid: num_attention_heads=0 must be a whole number from 1. Download",
    ),
    "no sizes": (lambda config, tensors: config.pop("hidden_size"), "lacks hidden_size"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_head_that_is_not_whole_is_refused(name, target, tmp_path):
    change, message = MISFITS[name]
    folder = changed(write_eagle3(tmp_path, SIZES, file=SAFETENSORS, shape=Shape(draft_vocab_size=20)), change)
    with pytest.raises(SpecdecError, match=message):
        LLM(str(target), speculative_config={"method": "eagle3", "model": str(folder)}, **SETTINGS)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Target(40, 48, 8), "40"),
        (Target(32, 50, 8), "vocab_size is 50, and this target's is 48"),
    ],
)
def test_another_targets_head_is_refused(method, sizes, message, target, tmp_path):
    write = write_eagle if method == "eagle" else write_eagle3
    head = write(tmp_path, sizes)
    with pytest.raises(CompatibilityError, match=message):
        planned(target, method=method, model=str(head.folder))


def test_an_eagle_head_of_another_width_is_refused(target, tmp_path):
    """It has an embedding and an LM head of its own, and could draft one token: then it reads its own output."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {"fc.weight": torch.zeros(40, 40 + SIZES.hidden_size), "lm_head.weight": torch.zeros(48, 40)}

    head = changed(write_eagle(tmp_path, Target(40, 48, 8), file=SAFETENSORS, shape=Shape(own_embeddings=True)), change)
    with pytest.raises(CompatibilityError, match=r"hidden_size of .* is 40, and must be the target's, 32: after"):
        planned(target, method="eagle", model=str(head))


def test_eagle_is_not_eagle3(target, tmp_path):
    head = write_eagle3(tmp_path, SIZES)
    with pytest.raises(CompatibilityError, match=r"^this is an EAGLE-3 head: use method 'eagle3', not 'eagle', for"):
        planned(target, method="eagle", model=str(head.folder))


@pytest.mark.parametrize("file", [BIN, SAFETENSORS])
def test_a_file_that_was_cut_off_is_refused(file, target, tmp_path):
    head = write_eagle3(tmp_path, SIZES, file=file)
    weights = tmp_path / file
    weights.write_bytes(weights.read_bytes()[:-1000])
    for method in ({"method": "eagle3"}, {}):
        with pytest.raises(ConfigError, match=r"cannot be read|is damaged"):
            planned(target, model=str(head.folder), **method)


class _Code:
    """A pickle that runs code: unpickling this object creates `file`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("save", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_code_in_a_checkpoint_is_not_run(save, target, tmp_path):
    head = write_eagle3(tmp_path, SIZES)
    traces = tmp_path / "it was run"
    save({**head.tensors, "norm.weight": _Code(traces)}, tmp_path / BIN)
    for method in ({"method": "eagle3"}, {}):
        with pytest.raises(ConfigError, match=r"for safety it is not loaded|cannot be read"):
            LLM(str(target), speculative_config={"model": str(head.folder), **method}, **SETTINGS)
    assert not traces.exists()


ODD: dict[str, tuple[Change, str]] = {
    "nan": (lambda config, tensors: tensors["norm.weight"].fill_(torch.nan), "not finite in norm.weight"),
    "infinite": (lambda config, tensors: tensors["fc.weight"].fill_(torch.inf), "not finite in fc.weight"),
    "no rows": (
        lambda config, tensors: tensors.update({"lm_head.weight": torch.empty(0, 32), "d2t": torch.empty(0).long()}),
        r"lm_head.weight of the draft head has the shape \[0, 32\]",
    ),
    "a number": (lambda config, tensors: tensors.update({"lm_head.weight": torch.tensor(1.0)}), "lm_head.weight"),
    "t2d": (lambda config, tensors: tensors.update({"t2d": torch.tensor(1)}), "the length of t2d is 0"),
    "rope_theta": (lambda config, tensors: config.update(rope_theta=-5.0), "rope_theta is -5.0"),
    "rms_norm_eps": (lambda config, tensors: config.update(rms_norm_eps=float("inf")), "rms_norm_eps inf"),
}


@pytest.mark.parametrize(("change", "message"), ODD.values(), ids=ODD)
def test_a_head_that_could_say_nothing_is_refused(change, message, target, tmp_path):
    head = changed(write_eagle3(tmp_path, SIZES, file=SAFETENSORS, shape=Shape(draft_vocab_size=20)), change)
    with pytest.raises(CompatibilityError, match=message) as caught:
        LLM(str(target), speculative_config={"method": "eagle3", "model": str(head)}, **SETTINGS)
    assert repr(str(head)) in str(caught.value)
