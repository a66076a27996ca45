"""Token streams that requests replay as a model's output: source files of Python's standard library, tokenized.

The tokenizer is the embedded model's.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from attrs import define, field
from tokenizers import Tokenizer

from specdec_model_tiny import model_path

NOT_TAKEN = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
MARGIN = 32  # unused tokens at the end of a replay, so that no draft exceeds it


def source_files() -> list[Path]:
    """Return the paths of the standard library's Python files, without tests and data, shuffled in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not NOT_TAKEN & set(path.relative_to(root).parts)]
    Random(0).shuffle(files)
    return files


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@cache
def token_ids(path: Path) -> np.ndarray:
    """Return the token ids of a whole file, int64 [num_tokens]."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return np.array(_tokenizer().encode(text, add_special_tokens=False).ids, dtype=np.int64)


def documents(number: int, num_tokens: int) -> list[np.ndarray]:
    """Return the first num_tokens token ids of each of `number` files of the standard library.

    Shorter files are skipped. Raises SystemExit if there are not enough files.
    """
    long_enough = (tokens for path in source_files() if len(tokens := token_ids(path)) >= num_tokens)
    found = [tokens[:num_tokens] for tokens in islice(long_enough, number)]
    if len(found) < number:
        raise SystemExit(
            f"only {len(found)} files of the standard library have {num_tokens} tokens; {number} are needed"
        )
    return found


def stretches(number: int, num_tokens: int) -> list[np.ndarray]:
    """Join the token ids of all source files, and return `number` slices of num_tokens token ids.

    The slices begin at even distances and may overlap.
    Raises SystemExit if the files have fewer than num_tokens tokens in total.
    """
    everything = np.concatenate([token_ids(path) for path in source_files()])
    if len(everything) < num_tokens:
        raise SystemExit(f"the standard library has {len(everything)} tokens here; {num_tokens} are needed")
    starts = np.linspace(0, len(everything) - num_tokens, number).astype(int)
    return [everything[start : start + num_tokens] for start in starts]


def random_documents(number: int, num_tokens: int) -> list[np.ndarray]:
    """Return `number` sequences of num_tokens token ids that are made of random words.

    There are 400 words of 1 to 8 tokens each, some far more frequent than others.
    """
    random = Random(0)
    words = [[random.randrange(64) for _ in range(random.randint(1, 8))] for _ in range(400)]
    found = []
    for _ in range(number):
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            tokens += words[min(int(random.expovariate(1 / 40)), len(words) - 1)]
        found.append(np.array(tokens[:num_tokens], dtype=np.int64))
    return found


def digest(streams: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(np.concatenate(streams).tobytes()).hexdigest()[:16]


@define(eq=False)
class Replay:
    """A stand-in for a request, which replays given token ids as the target model's output.

    It has the attributes of `RequestView` that proposers read.
    text: token ids of the prompt and the whole output.
    num_tokens: number of tokens known so far: those of the prompt, and the output tokens that were replayed.
    """

    id: str
    text: np.ndarray  # int64   prompt and all of the output
    num_prompt_tokens: int
    seed: int = 0
    num_tokens: int = field(init=False)
    num_new: int = 0  # tokens that the last step added

    def __attrs_post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        self.text.setflags(write=False)

    @property
    def token_ids(self) -> np.ndarray:
        return self.text[: self.num_tokens]

    @property
    def is_over(self) -> bool:
        return len(self.text) - self.num_tokens < MARGIN

    @property
    def new_token_ids(self) -> list[int]:
        tokens: list[int] = self.text[self.num_tokens - self.num_new : self.num_tokens].tolist()
        return tokens

    def advance(self, num_new: int) -> None:
        self.num_tokens += num_new
        self.num_new = num_new

    def verify(self, draft: Sequence[int]) -> int:
        """Accept the draft tokens up to the first that differs from the known output, and add the next output token.

        Returns the number of accepted draft tokens.
        """
        truth = self.text[self.num_tokens : self.num_tokens + len(draft)].tolist()
        num_accepted = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=True)) if a != b), len(draft))
        self.advance(num_accepted + 1)
        return num_accepted
