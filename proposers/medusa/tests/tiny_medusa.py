"""Tiny random Medusa heads, written in the layouts in which heads are published, with the reference's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from draft_heads import BIN, SAFETENSORS, Change, write_checkpoint
from medusa_reference import head_logits, random_weights, to_vllm, vllm_logits
from torch import Tensor

VOCAB_SIZE, HIDDEN_SIZE = 48, 32
NUM_MAPPED = 20
PT = "medusa_lm_head.pt"


@frozen(kw_only=True)
class Layout:
    """How heads are stored.

    is_vllms: vLLM's layout; False: FasterDecoding's.
    num_stated: the number of heads in config.json; None: the right one.
    token_map: the heads' vocabulary lacks tokens, and their output layers have "all" rows or "mapped" ones; None: the
        vocabulary is the target's.
    output: the output layers: each head's "own", "the target's", or one for all heads, under the name given.
    """

    is_vllms: bool = False
    heads: int = 3
    layers: int = 1
    num_stated: int | None = None
    file: str = PT
    prefix: str = ""
    has_bias: bool = True
    token_map: str | None = None
    output: str = "own"
    more: dict[str, Any] = field(factory=dict)  # further keys of config.json


LAYOUTS = {
    "medusa-vicuna-7b-v1.3": Layout(heads=5, num_stated=2),
    "safetensors": Layout(file="medusa_lm_head.safetensors"),
    "no layers": Layout(layers=0),
    "two layers": Layout(layers=2, file=BIN),
    "the target's output layer": Layout(output="the target's", more={"version": "2"}),
    "prefix medusa_head": Layout(prefix="medusa_head.", file=SAFETENSORS),
    "vllm-medusa-vicuna-7b-v1.3": Layout(is_vllms=True, heads=5, has_bias=False, file=SAFETENSORS),
    "vLLM, biases": Layout(is_vllms=True, file=BIN, prefix="medusa_heads."),
    "vLLM, two layers": Layout(is_vllms=True, layers=2, file=SAFETENSORS),
    "vLLM, no layers": Layout(is_vllms=True, layers=0, file=SAFETENSORS),
    "vLLM, some tokens": Layout(is_vllms=True, token_map="mapped", file=SAFETENSORS),
    "vLLM, some tokens of all": Layout(is_vllms=True, token_map="all", file=SAFETENSORS, prefix="medusa_heads."),
    "vLLM, lm_head": Layout(is_vllms=True, output="lm_head.weight", file=SAFETENSORS),
    "vLLM, lm_heads.0": Layout(is_vllms=True, output="lm_heads.0.weight", file=SAFETENSORS),
    "vLLM, scaled": Layout(is_vllms=True, file=SAFETENSORS, more={"logit_scale": 0.25}),
}
"""Made-up ones have no name of a repository."""
OF_THE_TARGET = "the target's output layer"


@frozen(eq=False)
class TinyMedusa:
    """logits: the reference's, from a hidden state [hidden_size] to float64 [num_heads, vocab]; -inf for tokens that
    the heads lack. lm_head: the target's, float64 [vocab, hidden_size]. ids: int64 [draft_vocab], the target's id of
    each token of the heads."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    logits: Callable[[Tensor], Tensor]
    lm_head: Tensor
    ids: Tensor


def write_medusa(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    *,
    change: Change | None = None,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = HIDDEN_SIZE,
) -> TinyMedusa:
    generator = torch.Generator().manual_seed(11)
    owns = layout.output == "own"
    tensors = random_weights(layout.heads, layout.layers, hidden_size, vocab_size, generator, own_head=owns)
    lm_head = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64).to(dtype).double()
    ids = torch.arange(vocab_size)
    config: dict[str, Any]
    if layout.is_vllms:
        tensors = to_vllm(tensors, layout.layers, bias=layout.has_bias)
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": hidden_size}
        config |= {"vocab_size": vocab_size, "num_heads": layout.heads, "num_hidden_layers": layout.layers}
        config |= {"truncated_vocab_size": None} | ({"medusa_fc_bias": True} if layout.has_bias else {})
    else:
        config = {"medusa_num_heads": layout.num_stated or layout.heads, "medusa_num_layers": layout.layers}
    if layout.token_map is not None:
        ids = torch.randperm(vocab_size, generator=generator)[:NUM_MAPPED]
        config["truncated_vocab_size"] = NUM_MAPPED
        if layout.token_map == "mapped":
            tensors |= {name: tensor[ids] for name, tensor in tensors.items() if name.startswith("lm_heads.")}
        tensors["token_map"] = ids
    if layout.output.startswith("lm_head"):
        config["original_lm_head"] = True
        tensors[layout.output] = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64)
    config |= layout.more
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    stored = {layout.prefix + name: tensor for name, tensor in tensors.items()}
    write_checkpoint(folder, config, stored, layout.file, change)

    def logits(hidden: Tensor) -> Tensor:
        if layout.is_vllms:
            return vllm_logits(tensors, config, hidden)
        return head_logits(tensors, hidden, layout.layers, lm_head)

    return TinyMedusa(folder, config, stored, logits, lm_head, ids)
