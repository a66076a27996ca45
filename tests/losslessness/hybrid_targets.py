"""Tiny targets with recurrent layers and a small vocabulary, whose next token depends mostly on the last one, so that
drafts made by chance are accepted now and then; and draft heads for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reference
from families import save_family
from recorded_runs import VOCAB_SIZE

sys.path.extend(str(Path(__file__).parents[2] / "proposers" / name / "tests") for name in ("eagle", "mtp"))

from tiny_heads import write_specforge
from tiny_mtp import add_modules, tiny_config, tiny_weights
from tiny_weights import Shape, Target

NUM_LAYERS = 6
KINDS = {  # the layers that keep a state, as configurations call them
    "granitemoehybrid": "linear_attention",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "qwen3_5_moe_text": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "qwen3_next": "linear_attention",
}


def save_hybrid(name: str, folder: Path) -> Path:
    """Save a target of six layers, of which two attend."""
    layers = [KINDS[name], "full_attention", KINDS[name]] * (NUM_LAYERS // 3)
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": NUM_LAYERS, "layer_types": layers}
    save_family(name, folder, **sizes, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None)
    model = reference.load(folder)
    model.get_input_embeddings().weight.data *= 20
    model.save_pretrained(folder)
    return folder


def save_eagle3_head(folder: Path) -> Path:
    """Save a random EAGLE-3 head for such a target."""
    sizes = Target(64, VOCAB_SIZE, NUM_LAYERS, embedding_rms=6.0, feature_rms=6.0)
    return write_specforge(folder, sizes, seed=4, shape=Shape(draft_vocab_size=8)).folder


def save_with_mtp_module(folder: Path) -> Path:
    """Save a Qwen3-Next target with a random module for multi-token prediction."""
    save_hybrid("qwen3_next", folder)
    config = tiny_config("qwen3_next", **json.loads((folder / "config.json").read_text()))
    add_modules(folder, "qwen3_next", config, tiny_weights("qwen3_next", config))
    return folder
