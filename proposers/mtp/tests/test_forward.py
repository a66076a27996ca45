"""The forward pass of an MTP module of each family is that of an independent reference in float64 (`mtp_reference`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_reference as reference
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from tiny_mtp import BY_NAME, of_the_module, stated, tiny_config, tiny_weights

from specdec_core import TargetInfo
from specdec_proposer_mtp.config import MTPConfig
from specdec_proposer_mtp.families import Family
from specdec_proposer_mtp.loading import find, layer_config, load, names_in_module, published_names
from specdec_proposer_mtp.module import MTPModule, kv_layout

NUM_SLOTS = 7
TOLERANCE = 1e-4  # transformers computes norms, softmax and routers in float32
Change = Callable[[Family], Family]


def tiny(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return a config.json, random weights under the published names, embeddings and features."""
    config, generator = tiny_config(name, **changes), torch.Generator().manual_seed(4)
    weights = tiny_weights(name, config, seed=3)
    inputs = torch.randn(2, NUM_SLOTS, config["hidden_size"], generator=generator, dtype=torch.float64)
    return config, weights, *inputs.unbind()


def loaded(family: Family, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> MTPModule:
    layer = layer_config(family, stated(config))
    layer._attn_implementation = "eager"
    module, rename = MTPModule(family, layer).double(), names_in_module(family, config["num_hidden_layers"])
    module.load_state_dict({ours: each for name, each in weights.items() if (ours := rename(name)) is not None})
    mask = torch.full((NUM_SLOTS, NUM_SLOTS), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    run = module.block.forward
    module.block.forward = lambda hidden, **others: run(hidden, **others | {"attention_mask": mask})
    return module.requires_grad_(False)


def gap(name: str, change: Change = lambda family: family) -> float:
    """Return the largest difference of a logit, or of a number that recurs, from the reference. change: makes a faulty
    row of the family's facts."""
    config, weights, embedded, features = tiny(name)
    positions = torch.arange(NUM_SLOTS)
    hidden, logits = reference.forward(name, config, weights, embedded, features, positions)
    family = change(BY_NAME[name])
    module = loaded(family, config, weights)
    output = module(embedded, features, positions)
    normed = module.norm(output)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    recurs = normed if family.recurs_normed else output
    return max(float((normed @ head.T - logits).abs().max()), float((recurs - hidden).abs().max()))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_module_computes_what_the_reference_does(name: str) -> None:
    assert gap(name) < TOLERANCE


def swapped(family: Family) -> Family:
    names = dict(family.names)
    names["enorm"], names["hnorm"] = names["hnorm"], names["enorm"]
    return evolve(family, names=names)


FAULTS: dict[str, Change] = {
    "the other order": lambda family: evolve(family, hidden_first=not family.hidden_first),
    "another position 0": lambda family: evolve(family, zero_first=not family.zero_first),
    "another recurrence": lambda family: evolve(family, recurs_normed=not family.recurs_normed),
    "swapped norms": swapped,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_row_is_noticed(name: str, fault: str) -> None:
    assert gap(name, FAULTS[fault]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, 1) for name in BY_NAME), *((name, 2) for name, family in BY_NAME.items() if family.num_modules)],
)
def test_a_published_checkpoint_is_loaded_and_saved_under_the_same_names(
    name: str, number: int, tmp_path: Path
) -> None:
    config, weights, *_ = tiny(name, num_nextn_predict_layers=number)
    published = {key: each.float() for key, each in of_the_module(name, config, weights).items()}
    (tmp_path / "config.json").write_text(json.dumps(stated(config) | {"model_type": name}))
    save_file({key: each.float().clone() for key, each in weights.items()}, tmp_path / "model.safetensors")
    sizes = (config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    target = TargetInfo(str(tmp_path), name, *sizes, 64, torch.float32, torch.device("cpu"))
    modules, saved = load(find(MTPConfig(), target, number), target, "eager"), {}
    for index, module in enumerate(modules):
        names = published_names(BY_NAME[name], config["num_hidden_layers"], index)
        saved |= {names(ours): tensor for ours, tensor in module.state_dict().items()}
    assert len(modules) == number
    assert saved.keys() == published.keys()
    for key, each in published.items():
        assert torch.equal(saved[key], each), key


@pytest.mark.parametrize("name", BY_NAME)
def test_the_kv_cache_has_the_shapes_of_the_decoder_layers_keys_and_values(name: str) -> None:
    from transformers import AttentionInterface

    shapes: list[tuple[int, ...]] = []

    def record(module: Any, query: Any, key: Any, value: Any, *args: Any, **others: Any) -> tuple[Any, None]:
        shapes.append((key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    config, weights, embedded, features = tiny(name)
    module = loaded(BY_NAME[name], config, weights)
    AttentionInterface.register("record_shapes", record)
    layer = module.attention.config
    layer._attn_implementation = "record_shapes"
    module(embedded, features, torch.arange(NUM_SLOTS))
    layout = kv_layout(layer, torch.float32)
    assert shapes == [(layout.num_kv_heads, layout.key_dim, layout.value_dim)]
