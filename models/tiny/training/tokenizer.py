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


STREAMS = {"train": (1.0, 0.5, 0.33), "decay": (0.15, 1.6, 0.55)}
"""The streams to train on, the second one while the learning rate decays. Each has a share of the documents, and edit
documents and drills (edits.py), as multiples of these documents' characters. They are made from all documents: the
more code is copied once, the less can be known by heart. A model learns best what it sees last, and this one is to show
what drafts gain on edits."""


def mix(documents: list[Document], name: str, seed: int) -> list[Document]:
    """Return the documents of a stream in random order. name: one of STREAMS."""
    share, edits, words = STREAMS[name]
    rng = random.Random(seed)
    chosen = rng.sample(documents, int(len(documents) * share))
    chars = sum(len(document.text) for document in chosen)
    mixed = [*chosen, *edit_documents(documents, seed, chars * edits), *drills(documents, seed, chars * words)]
    rng.shuffle(mixed)
    return mixed


def build(work: Path, seed: int = 0) -> None:
    """Encode the corpus: write each of STREAMS and ``heldout.npy`` with their weights under ``work``, unless they are
    there. Trains the tokenizer first, unless ``tokenizer/`` has one.

    seed: of the documents' choice and order, and of the edits.
    """
    missing = [name for name in STREAMS if not (work / f"{name}.npy").exists()]
    file = work / "tokenizer" / "tokenizer.json"
    documents = read_jsonl(work / "train.jsonl") if missing else []
    for name in missing:
        mixed = mix(documents, name, seed)
        if not file.exists():
            fast_tokenizer(train_tokenizer(mixed)).save_pretrained(file.parent)
        count = encode(Tokenizer.from_file(str(file)), mixed, work / f"{name}.npy")
        print(f"{name}: {count / 1e6:.1f}M tokens of {len(mixed)} documents")
    if not (work / "heldout.npy").exists():
        encode(Tokenizer.from_file(str(file)), read_jsonl(work / "heldout.jsonl"), work / "heldout.npy")
