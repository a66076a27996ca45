"""Test helpers: tokenizers of different kinds, and draft models with another vocabulary than their target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEXT = """The quick brown fox jumps over the lazy dog, and the dog does not mind: it has seen quicker foxes.
Der schnelle braune Fuchs springt über den faulen Hund; für den Hund ist das nichts Neues, aber schön.
def quick(fox: str) -> str:
    return fox + "jumps"  # 敏捷的棕色狐狸 🦊 über
"""


def byte_level(lines: Iterable[str] = (TEXT,), vocab_size: int = 330, **special: str) -> Any:
    """Train a byte-level BPE tokenizer like GPT-2's: all 256 bytes are tokens.

    lines: the training text.
    special: special tokens by the names that transformers gives them, such as eos_token.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, lines, vocab_size, list(special.values()), special, initial_alphabet=alphabet)


def sentence_piece(lines: Iterable[str] = (TEXT,), vocab_size: int = 400, **special: str) -> Any:
    """Train a BPE tokenizer like Llama's SentencePiece: a space is the character ▁, and byte tokens encode text that no
    other token covers.

    lines: the training text.
    special: special tokens by the names that transformers gives them, such as eos_token.
    """
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    known = ["<unk>", *special.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    made = _trained(tokenizer, lines, vocab_size, known, {"unk_token": "<unk>", **special})
    return _with_plain_bytes(made, special)


def _trained(
    tokenizer: Tokenizer, lines: Iterable[str], vocab_size: int, first: list[str], special: dict[str, str], **kw: Any
) -> Any:
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=first, show_progress=False, **kw)
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _with_plain_bytes(made: Any, special: dict[str, str]) -> Any:
    """Turn the byte tokens into ordinary tokens. Training made them special tokens to give them the lowest ids."""
    as_json = json.loads(made.backend_tokenizer.to_str())
    as_json["added_tokens"] = [token for token in as_json["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(as_json)), unk_token="<unk>", **special
    )


def save_words(folder: Path, words: Sequence[str]) -> None:
    """Save a tokenizer whose token i is the whole word words[i]."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def renumber(target: Path, folder: Path, ids: Sequence[int | None], noise: float = 0.0) -> Path:
    """Save a draft model that is a copy of a target with other token ids. Returns the copy's folder.

    ids: ids[i] is the target's id of the copy's token i, or None if this token is new and gets random weights.
    noise: standard deviation of the noise on the weights, as in `noisy_copy`.
    """
    generator = torch.Generator().manual_seed(0)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = weight.std() * torch.randn(len(ids), weight.shape[1], generator=generator)
            weights[name] = torch.stack([own[i] if its is None else weight[its] for i, its in enumerate(ids)])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"vocab_size": len(ids)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
