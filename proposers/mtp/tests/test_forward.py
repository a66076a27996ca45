"""The forward pass of an MTP module of each family is that of an independent reference in float64 (`mtp_reference`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mtp_reference as reference
import pytest
import torch
from attrs import evolve
from published_families import MORE, PUBLISHED

from specdec_proposer_mtp.families import Family
from specdec_proposer_mtp.loading import layer_config, names_in_module
from specdec_proposer_mtp.module import MTPModule, kv_layout

RULES = ("zero_position_0", "recur", "final_norm", "hidden_first")  # keys of the reference, not of config.json
NUM_SLOTS = 7
TOLERANCE = 1e-4  # transformers computes norms, softmax and routers in float32
Change = Callable[[Family], Family]


def tiny(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return a config.json, random weights under the published names, embeddings and features."""
    family, generator = PUBLISHED[name], torch.Generator().manual_seed(3)
    rules = {"zero_position_0": family.zero_first, "recur": "post" if family.recurs_normed else "pre"}
    config = reference.tiny_config(name, **rules) | MORE.get(name, {})
    weights = reference.random_weights(name, rules, generator)
    inputs = torch.randn(2, NUM_SLOTS, config["hidden_size"], generator=generator, dtype=torch.float64)
    return config, weights, *inputs.unbind()


def loaded(family: Family, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> MTPModule:
    stated = {key: value for key, value in config.items() if key not in RULES}
    layer = layer_config("tiny", family, stated)
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
    family = change(PUBLISHED[name])
    module = loaded(family, config, weights)
    output = module(embedded, features, positions)
    normed = module.norm(output)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    recurs = normed if family.recurs_normed else output
    return max(float((normed @ head.T - logits).abs().max()), float((recurs - hidden).abs().max()))


@pytest.mark.parametrize("name", PUBLISHED)
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
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_wrong_row_is_noticed(name: str, fault: str) -> None:
    assert gap(name, FAULTS[fault]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_module_saves_exactly_the_published_tensors(name: str) -> None:
    config, weights, *_ = tiny(name)
    family = PUBLISHED[name]
    rename = names_in_module(family, config["num_hidden_layers"])
    module = loaded(family, config, weights)
    published = {ours: weights[each] for each in weights if (ours := rename(each)) is not None}
    saved = module.state_dict()
    assert {*saved} == {*published}
    for ours, tensor in published.items():
        torch.testing.assert_close(saved[ours], tensor.to(saved[ours].dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_kv_cache_has_the_shapes_of_the_decoder_layers_keys_and_values(name: str) -> None:
    from transformers import AttentionInterface

    shapes: list[tuple[int, ...]] = []

    def record(module: Any, query: Any, key: Any, value: Any, *args: Any, **others: Any) -> tuple[Any, None]:
        shapes.append((key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    config, weights, embedded, features = tiny(name)
    module = loaded(PUBLISHED[name], config, weights)
    AttentionInterface.register("record_shapes", record)
    layer = module.attention.config
    layer._attn_implementation = "record_shapes"
    module(embedded, features, torch.arange(NUM_SLOTS))
    layout = kv_layout(layer, torch.float32)
    assert shapes == [(layout.num_kv_heads, layout.key_dim, layout.value_dim)]
