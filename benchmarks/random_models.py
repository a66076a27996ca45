"""Models with random weights, of the sizes that the embedded model leaves out, and prompts for them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 8192


def prompt(num_tokens: int, request: int) -> list[int]:
    """Make up the token ids of a prompt.

    request: index of the request. The first token id depends on it, so that prefix caches have no hits.
    """
    return [3 + (7 * request + 31 * i + i * i // 5) % 8000 for i in range(num_tokens)]


SHARED = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "eos_token_id": None,
}


def save_llama(folder: Path) -> None:
    """Save a Llama with 82M weights in bfloat16."""
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        **SHARED,
    )
    _save(LlamaForCausalLM, config, folder)


def save_qwen3(folder: Path) -> None:
    """Save a Qwen3 with 0.4B weights in bfloat16, the size of the smallest published one but for its vocabulary."""
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        **SHARED,
    )
    _save(Qwen3ForCausalLM, config, folder)


def _save(kind: type[PreTrainedModel], config: PreTrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
