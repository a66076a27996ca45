"""Tests that speculators of all published layouts give the same logits as the reference implementation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import BIN, SAFETENSORS, target_info, write_checkpoint
from mlp_reference import chain_logits, random_hidden, random_weights

from specdec_core import TargetInfo
from specdec_proposer_mlp import module
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.loading import find, load
from specdec_proposer_mlp.module import Norm, Speculator

Patch = pytest.MonkeyPatch
VOCAB_SIZE, HIDDEN_SIZE, BATCH = 50, 32, 3
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "emb_dim": HIDDEN_SIZE, "n_candidates": 5}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3-8b-accelerator": {"inner_dim": 24, "n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2]},
    "granite-7b-instruct-accelerator": {"inner_dim": 32, "n_predict": 5, "top_k_tokens_per_head": [4, 3, 2, 2, 2]},
    "llama2-70b-accelerator": {"inner_dim": 32, "n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2]}
    | {"tie_weights": True, "scale_input": True},
    "inner_dim 0": {"n_predict": 3, "top_k_tokens_per_head": [5, 4, 3], "inner_dim": 0},
    "tied, wide": {"inner_dim": 40, "n_predict": 2, "top_k_tokens_per_head": [5, 3], "tie_weights": True},
    "scaled": {"inner_dim": 40, "n_predict": 3, "top_k_tokens_per_head": [5, 3, 2], "scale_input": True},
    "one head": {"inner_dim": 24, "n_predict": 1, "top_k_tokens_per_head": [5]},
}
"""Made-up ones have no name of a repository."""


def differences(
    folder: Path, case: dict[str, Any], dtype: torch.dtype, file: str = SAFETENSORS, tied_storage: str = "once"
) -> torch.Tensor:
    """Write a speculator, load it as the plugin does, and run all its heads on a batch. Returns by how much its logits
    differ from the reference's, [batch, n_predict]."""
    config, generator = {**SIZES, **case}, torch.Generator().manual_seed(3)
    weights = random_weights(config, generator, tied_storage)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    write_checkpoint(folder, config, weights, file)
    hidden = torch.stack([random_hidden(config, generator) for _ in range(BATCH)]).to(dtype)
    tokens = torch.randint(VOCAB_SIZE, (BATCH, config["n_predict"]), generator=generator)
    expected = torch.stack([chain_logits(weights, config, *row) for row in zip(hidden, tokens.tolist(), strict=True)])
    target = target_info(VOCAB_SIZE, HIDDEN_SIZE, dtype)
    speculator = loaded(folder, target)
    with torch.inference_mode():
        state, rows = speculator.first_state(hidden), []
        for i in range(config["n_predict"]):
            state, logits = speculator(i, state, tokens[:, i])
            assert (state.dtype, logits.dtype) == (dtype, dtype)
            rows.append(logits)
    return (torch.stack(rows, dim=1) - expected).abs().amax(dim=-1)


def loaded(folder: Path, target: TargetInfo) -> Speculator:
    options = MLPSpeculatorConfig(model=folder)
    return load(find(options, target, options.default_num_speculative_tokens(target.device)), target)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("file", [SAFETENSORS, BIN])
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_the_reference(name, file, dtype, tmp_path):
    tied_storage = "all" if file == BIN else "once"  # as transformers writes them
    found = differences(tmp_path, PUBLISHED[name], dtype, file, tied_storage)
    assert float(found.max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("file", [SAFETENSORS, BIN])
@pytest.mark.parametrize("tied_storage", ["once", "all"])
def test_tied_weights_may_be_stored_once_or_for_every_head(tied_storage, file, tmp_path):
    found = differences(tmp_path, PUBLISHED["llama2-70b-accelerator"], torch.float32, file, tied_storage)
    assert float(found.max()) < TOLERANCE[torch.float32]


def test_keys_that_config_json_leaves_out_are_the_published_defaults(tmp_path):
    case = {"inner_dim": 0, "n_predict": 3, "top_k_tokens_per_head": [5, 4, 3]}
    weights = random_weights(SIZES | case, torch.Generator().manual_seed(0))
    write_checkpoint(tmp_path, {key: SIZES[key] for key in ("vocab_size", "emb_dim")}, weights)
    options = MLPSpeculatorConfig(model=tmp_path, n_candidates=60)
    found = find(options, target_info(VOCAB_SIZE, HIDDEN_SIZE), 3)
    assert found.head.top_k_tokens_per_head == (5, 4, 3)
    assert (found.head.inner_dim, found.head.tie_weights, found.head.scale_input) == (HIDDEN_SIZE, False, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_exact_as_its_weights(dtype, tmp_path):
    """Norms are computed in float32, so that only the products round."""
    found = differences(tmp_path, PUBLISHED["llama2-70b-accelerator"], dtype)
    assert 0 < float(found.max()) < {torch.float16: 0.1, torch.bfloat16: 0.8}[dtype]  # logits are around 5


def _forward(patch: Patch, change: Any) -> None:
    """Let `change` replace the three arguments of the module's `forward`."""
    forward = Speculator.forward
    patch.setattr(Speculator, "forward", lambda self, *args: forward(self, *change(self, *args)))


def the_head_before_is_used(patch: Patch) -> None:
    _forward(patch, lambda self, i, state, token_ids: (i if i < 2 else i - 1, state, token_ids))


def all_heads_read_the_first_token(patch: Patch) -> None:
    first: list[torch.Tensor] = []

    def change(self: Any, i: int, state: torch.Tensor, token_ids: torch.Tensor) -> tuple[Any, ...]:
        first.append(token_ids)
        return i, state, first[0]

    _forward(patch, change)


def rows_are_those_of_another_request(patch: Patch) -> None:
    _forward(patch, lambda self, i, state, token_ids: (i, state.roll(i, 0), token_ids))


def embeddings_have_no_weight(patch: Patch) -> None:
    def change(self: Any, *args: Any) -> tuple[Any, ...]:
        self._token_weight = 1.0
        return args

    _forward(patch, change)


def embeddings_have_the_weight_of_another_number_of_heads(patch: Patch) -> None:
    def change(self: Any, i: int, state: torch.Tensor, token_ids: torch.Tensor) -> tuple[Any, ...]:
        state_weight = 0.5 ** (0.5 / 3)
        self._token_weight = ((1 - state_weight**2) * self.proj[0].out_features / 2) ** 0.5 / state_weight
        return i, state, token_ids

    _forward(patch, change)


def the_input_is_not_normed(patch: Patch) -> None:
    patch.setattr(Speculator, "first_state", lambda self, hidden: hidden)


def the_input_is_not_divided(patch: Patch) -> None:
    first_state = Speculator.first_state
    patch.setattr(Speculator, "first_state", lambda self, hidden: first_state(self, hidden) * 2**0.5)


def norms_have_no_bias(patch: Patch) -> None:
    normed = module.rms_normed
    patch.setattr(Norm, "forward", lambda self, hidden: self.weight * normed(hidden))


def norms_subtract_the_mean(patch: Patch) -> None:
    forward = Norm.forward
    patch.setattr(Norm, "forward", lambda self, hidden: forward(self, hidden - hidden.mean(-1, keepdim=True)))


def the_activation_is_approximate(patch: Patch) -> None:
    patch.setattr(module, "gelu", partial(torch.nn.functional.gelu, approximate="tanh"))


SCALED_INPUT = (the_input_is_not_normed, the_input_is_not_divided)
MISTAKES = [
    the_head_before_is_used,
    all_heads_read_the_first_token,
    rows_are_those_of_another_request,
    embeddings_have_no_weight,
    embeddings_have_the_weight_of_another_number_of_heads,
    *SCALED_INPUT,
    norms_have_no_bias,
    norms_subtract_the_mean,
    the_activation_is_approximate,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_noticed(mistake, tmp_path, monkeypatch):
    case = PUBLISHED["llama2-70b-accelerator" if mistake in SCALED_INPUT else "llama3-8b-accelerator"]
    mistake(monkeypatch)
    found = differences(tmp_path, case, torch.float32)
    assert float(found.max()) > 10 * TOLERANCE[torch.float32]


def test_another_order_of_tied_projections_is_noticed(tmp_path, monkeypatch):
    _forward(monkeypatch, lambda self, i, state, token_ids: (min(i, 1) if i < 3 else 0, state, token_ids))
    found = differences(tmp_path, PUBLISHED["llama2-70b-accelerator"], torch.float32)
    assert float(found[:, :3].max()) < TOLERANCE[torch.float32] < float(found[:, 3].min())
