"""IBM's published speculators, by their config.json files and the tensors of the authors' code (fms-extras,
models/speculator.py), fit their targets. The files are headers of full size without weights."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from draft_heads import write_header

from specdec_core import CompatibilityError, TargetInfo
from specdec_proposer_mlp import MLPSpeculatorConfig
from specdec_proposer_mlp.loading import find

SIZES = {  # vocab_size, emb_dim, inner_dim, n_predict, top_k_tokens_per_head, the size on the hub in GB
    "llama3-8b-accelerator": (128256, 4096, 3072, 4, [4, 3, 2, 2], 4.81 + 1.58),
    "llama-13b-accelerator": (32000, 5120, 4096, 3, [5, 3, 2], 1.68),
}


def tensors(vocab_size: int, emb_dim: int, inner_dim: int, n_predict: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(n_predict):
        shapes[f"speculator.emb.{i}.weight"] = shapes[f"speculator.head.{i}.weight"] = (vocab_size, inner_dim)
        shapes[f"speculator.proj.{i}.weight"] = (inner_dim, inner_dim if i else emb_dim)
        shapes |= {f"speculator.ln.{i}.{part}": (inner_dim,) for part in ("weight", "bias")}
    return shapes


@pytest.mark.parametrize("name", SIZES)
def test_a_speculator_of_full_size_fits_its_target(name: str, tmp_path: Path) -> None:
    *sizes, top_k, gigabytes = SIZES[name]
    keys = dict(zip(("vocab_size", "emb_dim", "inner_dim", "n_predict"), sizes, strict=True))
    config = {"model_type": "mlp_speculator", **keys, "n_candidates": 5, "top_k_tokens_per_head": top_k}
    target = TargetInfo("any", "llama", sizes[0], sizes[1], 32, 4096, torch.float16, torch.device("cpu"))
    shapes = tensors(*sizes)
    found = find(MLPSpeculatorConfig(model=write_header(tmp_path / "whole", config, shapes)), target, sizes[3])
    assert found.num_weights == sum(map(prod, shapes.values()))
    assert 2 * found.num_weights / 1e9 == pytest.approx(gigabytes, abs=0.01)
    for i, tensor in enumerate(shapes):
        wrong = {**shapes, tensor: (shapes[tensor][0] + 8, *shapes[tensor][1:])}
        options = MLPSpeculatorConfig(model=write_header(tmp_path / str(i), config, wrong))
        with pytest.raises(CompatibilityError):
            find(options, target, sizes[3])
