"""Teach the tiny model not to repeat itself under greedy decoding: unlikelihood training (Welleck et al. 2020).

A model of this size, once it repeats a few tokens, goes on repeating them. Here it continues excerpts of the corpus
greedily, and the tokens of long n-grams that are there a third time become less likely; batches of the corpus keep the
rest. Code repeats short n-grams for good reasons, and long ones once: with these unwanted, too, the model forgets more
code.

This takes hundreds of steps at the learning rates of a decay. A short run at the end of one, at small learning rates,
also stops the repetition, but the model then forgets code and edits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from .data import BATCH_UNITS, UNIT, Units
from .drafts import END, continue_excerpts, cut
from .edits import RESULT
from .export import export
from .model import Trainee
from .state import restore, save, start_from
from .train import make_optimizers, update

NGRAM, ALLOWED = 12, 2
"""The tokens of an n-gram are unwanted where it follows as many occurrences of itself as are allowed."""
LENGTH = 256
TEXTS, ROWS = 512, 4
"""Texts that the model writes at once, and how many of those with unwanted tokens are in a batch."""
WEIGHT = 0.3
"""Of the unlikelihood, beside the loss on the corpus."""
SEQUENCE = 1024
CODE_SHARE = 0.8
"""Of the batches of the corpus, how many come from the stream that is mostly code. With more edits, such as the decay's
stream has, the model writes headers of edits in the middle of code."""
WARM_UP_STEPS = 20


def repeats(texts: np.ndarray, starts: np.ndarray, result: list[int]) -> np.ndarray:
    """Return which tokens repeat an n-gram of the continuation, all but the n-gram's first, bool in the shape of
    ``texts``.

    texts: token ids, int32 [number, length], padded with -1. starts: int64 [number], where each continuation begins.
    result: token ids of the line after which an edit document repeats its code; from there to the document's end, none
        is returned.
    """
    found = np.zeros(texts.shape, bool)
    for row, (text, start) in enumerate(zip(texts.tolist(), starts.tolist(), strict=True)):
        times: Counter[tuple[int, ...]] = Counter()
        is_result = False
        for end in range(1, len(text) + 1):
            is_result = text[end - 1] != END and (is_result or text[max(0, end - len(result)) : end] == result)
            if is_result or end < start + NGRAM:
                continue
            ngram = tuple(text[end - NGRAM : end])
            if times[ngram] >= ALLOWED and -1 not in ngram:
                found[row, end - NGRAM + 1 : end] = True
            times[ngram] += 1
    return found


def unloop(work: Path, rounds: int, steps: int, peak: float, start: Path | None, seen: int) -> None:
    """Train for a number of rounds. Each begins with new continuations; the learning rate falls to 0 over all rounds.

    steps: optimizer steps of a round. peak: the highest learning rate.
    start: folder of an exported model to begin with; None: the checkpoint of the work folder. seen: number of tokens
        that it was trained on.
    """
    trainee = Trainee(seed=0)
    streams = [Units(work / f"{name}.npy", seed=2) for name in ("train", "decay")]
    optimizers = make_optimizers(trainee, peak)
    if start is None:
        progress = restore(work / "checkpoint.pt", trainee, optimizers)
    else:
        progress = start_from(start, trainee, seen)
    trainee.sync()
    result = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json")).encode(RESULT.lstrip()).ids
    corpus = np.load(work / "train.npy", mmap_mode="r")
    num_used = [0, 0]  # batches of each stream
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            save(work / "checkpoint.pt", trainee, optimizers, progress)
            export(work, Path(folder))
            texts, starts = continue_excerpts(cut(corpus, LENGTH, turn * TEXTS, TEXTS), 0.0, Path(folder))
        unwanted = repeats(texts, starts, result)
        print(f"round {turn}: {unwanted[texts >= 0].mean():.1%} of the tokens repeat an n-gram", flush=True)
        ids, marks = torch.from_numpy(np.maximum(texts, 0)).long(), torch.from_numpy(unwanted[:, 1:])
        order = marks.any(dim=1).nonzero()[:, 0]
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(turn))]
        for step in tqdm(range(turn * steps, (turn + 1) * steps), disable=None):
            stream = 0 if num_used[0] + 1 <= CODE_SHARE * (step + 1) else 1
            loss = trainee.loss(*streams[stream].batch(num_used[stream] * BATCH_UNITS, SEQUENCE))
            num_used[stream] += 1
            if len(order):
                rows = order[torch.arange(step * ROWS, (step + 1) * ROWS) % len(order)]
                loss = loss + WEIGHT * trainee.unlikelihood(ids[rows], marks[rows])
            update(trainee, optimizers, loss, peak * min(1 - step / (rounds * steps), (step + 1) / WARM_UP_STEPS))
            progress.tokens += BATCH_UNITS * UNIT
    save(work / "checkpoint.pt", trainee, optimizers, progress)


def main() -> None:
    """The command ``python -m training.unloop``."""
    parser = argparse.ArgumentParser(description="Train a model not to repeat itself, at the end of its run.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus and the checkpoint")
    parser.add_argument("--rounds", type=int, default=8, help="how often the model writes new texts")
    parser.add_argument("--steps", type=int, default=90, help="optimizer steps of a round")
    parser.add_argument("--peak", type=float, default=1.2e-3, help="highest learning rate")
    parser.add_argument("--start", type=Path, help="folder of an exported model to begin with")
    parser.add_argument("--seen", type=float, default=0, help="tokens that this model was trained on")
    given = parser.parse_args()
    unloop(given.work, given.rounds, given.steps, given.peak, given.start, int(given.seen))


if __name__ == "__main__":
    main()
