"""A tiny target model with random weights, for tests. Its weights are so large that errors in its inputs change its
output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def tiny_target(folder: str | Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a small random Llama without a tokenizer in `folder`, and return the folder.

    Its weights are large (`initializer_range`), so that a wrong position, mask or hidden state changes its output. Its
    vocabulary is small, so that the output sometimes repeats itself. It has no end-of-text token.

    seed: the seed of the random weights.
    config: fields of transformers' LlamaConfig to override, such as hidden_size, num_hidden_layers or vocab_size.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    sizes = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes | config)).to(torch.float32)
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return Path(folder)
