"""Tiny random MTP modules under their published names, in the sizes of `mtp_checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mtp_checkpoints as checkpoints
import torch
from safetensors.torch import load_file, save_file

from specdec_proposer_mtp.families import FAMILIES
from specdec_proposer_mtp.loading import names_in_module
from specdec_testing import tiny_target

Weights = dict[str, torch.Tensor]
BY_NAME = {family.name: family for family in FAMILIES}
MORE: dict[str, dict[str, Any]] = {  # keys of published config.json files that the reference does not read
    "deepseek_v3": {"num_key_value_heads": 4},
    "longcat_flash": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 8,
    },
}
RULES = ("zero_position_0", "recur", "final_norm", "hidden_first")  # keys of the reference, not of config.json


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a tiny model for the reference: where implementations differ, with this plugin's choices."""
    family = BY_NAME[name]
    rules = {"zero_position_0": family.zero_first, "recur": "post" if family.recurs_normed else "pre"}
    return checkpoints.tiny_config(name, **rules) | MORE.get(name, {}) | changes


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json has of the reference's config."""
    return {key: value for key, value in config.items() if key not in RULES}


def tiny_weights(name: str, config: dict[str, Any], seed: int = 2) -> Weights:
    """Return random float64 weights of a module, with the target's embedding, final norm and LM head."""
    found: Weights = checkpoints.random_weights(name, config, torch.Generator().manual_seed(seed))
    return found


def of_the_module(name: str, config: dict[str, Any], weights: Weights) -> Weights:
    """Return the tensors of the modules themselves, without those of the target and copies of them."""
    others = {"model.embed_tokens.weight", "lm_head.weight"}
    for index in range(config["num_nextn_predict_layers"]):
        names = checkpoints.names(name, config, index)
        others |= {names["head"]} | ({names["embed"]} if BY_NAME[name].copies else set())
        others |= {"model.norm.weight"} if names["final"] is not None else set()
    return {key: each for key, each in weights.items() if key not in others}


def loaded_into(module: torch.nn.Module, name: str, config: dict[str, Any], weights: Weights) -> None:
    """Give a module its weights, which have their published names."""
    rename = names_in_module(BY_NAME[name], config["num_hidden_layers"])
    module.load_state_dict({ours: each for key, each in weights.items() if (ours := rename(key)) is not None})


def add_modules(folder: Path, name: str, config: dict[str, Any], weights: Weights) -> None:
    """Add modules to a target's checkpoint, in a second file of weights, in float32. Tensors that the checkpoint
    already has are left out."""
    number = config["num_nextn_predict_layers"]
    renames = [names_in_module(BY_NAME[name], config["num_hidden_layers"], index) for index in range(number)]
    its = load_file(folder / "model.safetensors")
    ours = [key for key in weights if any(rename(key) is not None for rename in renames)]
    module = {key: weights[key].float() for key in ours if key not in its}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file(module, folder / "model-2.safetensors", metadata={"format": "pt"})
    index = dict.fromkeys(its, "model-1.safetensors") | dict.fromkeys(module, "model-2.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": number}))


def llama_with_modules(folder: Path, number: int = 1) -> Path:
    """Save a tiny Llama with MTP modules, whose weights are so large that errors in their inputs change their drafts.
    Returns the folder."""
    tiny_target(folder)
    written = json.loads((folder / "config.json").read_text())
    config = tiny_config("llama", **written, num_nextn_predict_layers=number)
    weights = tiny_weights("llama", config)
    large = {key: 3 * each if key.endswith("_proj.weight") else each for key, each in weights.items()}
    add_modules(folder, "llama", config, large)
    return folder
