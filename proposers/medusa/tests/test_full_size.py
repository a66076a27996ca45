"""The heads for Vicuna-7B, with the tensors that the authors' code saves (github.com/FasterDecoding/Medusa), fit that
target. The file is a header of full size without weights."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from draft_heads import write_header

from specdec_core import CompatibilityError, TargetInfo
from specdec_proposer_medusa import MedusaConfig, is_medusa
from specdec_proposer_medusa.loading import find

VICUNA = TargetInfo("lmsys/vicuna-7b-v1.3", "llama", 32000, 4096, 32, 2048, torch.float16, torch.device("cpu"))
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
SHAPES: dict[str, tuple[int, ...]] = {}
for head in range(5):
    SHAPES |= {
        f"{head}.0.linear.weight": (4096, 4096),
        f"{head}.0.linear.bias": (4096,),
        f"{head}.1.weight": (32000, 4096),
    }
FILE = "medusa_lm_head.safetensors"


def test_heads_of_full_size_fit_their_target(tmp_path: Path) -> None:
    found = find(MedusaConfig(model=write_header(tmp_path, CONFIG, SHAPES, FILE)), VICUNA, 63)
    assert found.num_weights == sum(map(prod, SHAPES.values()))
    assert (tmp_path / FILE).stat().st_size / 1e9 == pytest.approx(1.48, rel=0.005)  # as the file on the hub
    assert is_medusa(CONFIG, SHAPES)


def test_each_tensor_counts(tmp_path: Path) -> None:
    for i, tensor in enumerate(SHAPES):
        wrong = {**SHAPES, tensor: (SHAPES[tensor][0] + 8, *SHAPES[tensor][1:])}
        options = MedusaConfig(model=write_header(tmp_path / str(i), CONFIG, wrong, FILE))
        with pytest.raises(CompatibilityError):
            find(options, VICUNA, 63)
