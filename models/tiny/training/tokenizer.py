"""The byte-level BPE tokenizer of the tiny model, and the corpus encoded with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Document, read_jsonl
from .edits import drills, edit_documents
from .stream import END_OF_TEXT, encode

VOCABULARY = 8192
PADDING = "<|padding|>"
SAMPLE_CHARS = 40_000_000
# Words with one leading character, digits in threes, punctuation, and indentation together with its newline.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample(documents: list[Document], limit: int) -> Iterator[str]:
    """Yield the texts of documents in order, until they have ``limit`` characters in total."""
    for document in documents:
        if limit <= 0:
            return
        limit -= len(document.text)
        yield document.text


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of :data:`VOCABULARY` entries on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(sample(documents, SAMPLE_CHARS), trainer)
    return tokenizer


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for transformers. The end-of-text token is both the BOS token and the EOS token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build(work: Path, seed: int = 0) -> None:
    """Encode the corpus and synthesized edit documents: write ``train.npy`` and ``heldout.npy`` with their weights
    under ``work``, unless both are there. Trains the tokenizer first, unless ``tokenizer/`` has one.

    seed: of the edits, and of the documents' order.
    """
    if (work / "train.npy").exists() and (work / "heldout.npy").exists():
        return
    train, heldout = read_jsonl(work / "train.jsonl"), read_jsonl(work / "heldout.jsonl")
    edits = list(edit_documents(train, seed))
    documents = train + edits + list(drills(train, seed))
    random.Random(seed).shuffle(documents)
    if (work / "tokenizer" / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(documents)
        fast_tokenizer(tokenizer).save_pretrained(work / "tokenizer")
    held = encode(tokenizer, heldout, work / "heldout.npy")
    count = encode(tokenizer, documents, work / "train.npy")
    print(f"{count / 1e6:.1f}M training tokens ({len(edits)} edit documents), {held / 1e6:.2f}M held out")
