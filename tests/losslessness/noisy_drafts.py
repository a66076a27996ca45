"""Draft models made from their targets by adding noise to the weights, with the target's vocabulary or another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


def save_noisy(target: Path, folder: Path, ids: Sequence[int | None]) -> Path:
    """Save a draft model: the target with noise on its weights and a new vocabulary.

    ids: for each token of the new vocabulary, its token id in the target; None if the target lacks the token.
    """
    generator = torch.Generator().manual_seed(3)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = weight.std() * torch.randn(len(ids), weight.shape[1], generator=generator)
            weights[name] = torch.stack([own[i] if its is None else weight[its] for i, its in enumerate(ids)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"vocab_size": len(ids)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_words(folder: Path, words: Sequence[str]) -> None:
    """Save a tokenizer with these words as its tokens. It decodes token ids to text without spaces between the
    words."""
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_in_other_words(target: Path, folder: Path, target_words: Sequence[str], words: Sequence[str]) -> Path:
    """Save a draft model, made from the target with noise, whose tokenizer has the tokens `words`.

    The embedding matrix has two rows more than the tokenizer has tokens.

    target_words: the tokens of the target's tokenizer.
    """
    ids = [target_words.index(word) if word in target_words else None for word in words]
    save_words(save_noisy(target, folder, [*ids, None, None]), words)
    return folder
