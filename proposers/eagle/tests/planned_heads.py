"""The small target of the tests of the plugin, plans of engines with it, and changes of saved heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_heads import SAFETENSORS, TinyHead
from tiny_weights import Target

from specdec_core import Plan
from specdec_core.api.arguments import dry_run

SIZES = Target(hidden_size=32, vocab_size=48, num_hidden_layers=8)
CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True}
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def planned(target: Path, **config: Any) -> Plan:
    return dry_run(str(target), speculative_config=config, skip_tokenizer_init=True).plan


def changed(head: TinyHead, change: Change) -> Path:
    """Let the function `change` modify the config and the tensors of a head that is saved as safetensors. Returns the
    head's folder."""
    config, tensors = json.loads((head.folder / "config.json").read_text()), load_file(head.folder / SAFETENSORS)
    change(config, tensors)
    (head.folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head.folder / SAFETENSORS)
    return head.folder
