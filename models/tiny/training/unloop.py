"""Teach the tiny model not to repeat itself under greedy decoding: unlikelihood training (Welleck et al. 2020).

A model of this size, once it repeats a few tokens, goes on repeating them. Here it continues excerpts of the corpus
greedily, and the tokens of long n-grams that are there a third time become less likely; batches of the corpus keep the
rest. Code repeats short n-grams for good reasons, and long ones once: with these unwanted, too, the model forgets more
code.
The run begins with the ``checkpoint.pt`` of the work folder, trained until the learning rate has fallen to a third of
its peak (`training.train --end 0.3`), takes it to 0, and replaces the checkpoint. After a whole decay, the model
forgets more of its edits. The result is a mean of the weights before and after (Wortsman et al. 2022, "Robust
fine-tuning of zero-shot models"), since the weights after the run predict code and edits less well.
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
from .drafts import continue_excerpts, cut
from .edits import RESULT
from .export import export
from .model import Trainee
from .state import restore, save
from .train import make_optimizers, update

NGRAM, ALLOWED = 12, 2
"""The tokens of an n-gram are unwanted where it follows as many occurrences of itself as are allowed."""
LENGTH = 256
TEXTS, ROWS = 512, 8
"""Texts that the model writes at once, and how many of them are in a batch."""
WEIGHT = 0.3
"""Of the unlikelihood, beside the loss on the corpus."""
SEQUENCE = 1024


def repeats(texts: np.ndarray, starts: np.ndarray, result: list[int]) -> np.ndarray:
    """Return which tokens repeat an n-gram of the continuation, all but the n-gram's first, bool in the shape of
    ``texts``.

    texts: token ids, int32 [number, length], padded with -1. starts: int64 [number], where each continuation begins.
    result: token ids of the line after which an edit document repeats its code; from there on, none is returned.
    """
    found = np.zeros(texts.shape, bool)
    for row, (text, start) in enumerate(zip(texts.tolist(), starts.tolist(), strict=True)):
        times: Counter[tuple[int, ...]] = Counter()
        for end in range(start + NGRAM, len(text) + 1):
            ngram = tuple(text[end - NGRAM : end])
            if text[end - len(result) : end] == result:
                break
            if times[ngram] >= ALLOWED and -1 not in ngram:
                found[row, end - NGRAM + 1 : end] = True
            times[ngram] += 1
    return found


def unloop(work: Path, rounds: int, steps: int, peak: float, kept: float) -> None:
    """Train for a number of rounds. Each begins with new continuations; the learning rate falls to 0 over all rounds.

    steps: optimizer steps of a round. peak: the first step's learning rate.
    kept: share of the weights from before in the mean.
    """
    trainee = Trainee(seed=0)
    # Most of the decay's stream is edits. Alone, it lets the model forget code.
    streams = [Units(work / f"{name}.npy", seed=2) for name in ("train", "decay")]
    optimizers = make_optimizers(trainee, peak)
    progress = restore(work / "checkpoint.pt", trainee, optimizers)
    trainee.sync()
    before = {name: master.detach().clone() for name, master in trainee.masters.items()}
    result = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json")).encode(RESULT.lstrip()).ids
    corpus = np.load(work / "train.npy", mmap_mode="r")
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            export(work, Path(folder))
            texts, starts = continue_excerpts(cut(corpus, LENGTH, turn * TEXTS, TEXTS), 0.0, Path(folder))
        unwanted = repeats(texts, starts, result)
        print(f"round {turn}: {unwanted[texts >= 0].mean():.1%} of the tokens repeat an n-gram", flush=True)
        ids, marks = torch.from_numpy(np.maximum(texts, 0)).long(), torch.from_numpy(unwanted[:, 1:])
        order = torch.randperm(TEXTS, generator=torch.Generator().manual_seed(turn))
        for step in tqdm(range(steps), disable=None):
            rows = order[torch.arange(step * ROWS, (step + 1) * ROWS) % TEXTS]
            loss = trainee.loss(*streams[step % 2].batch(progress.units, SEQUENCE))
            loss = loss + WEIGHT * trainee.unlikelihood(ids[rows], marks[rows])
            update(trainee, optimizers, loss, peak * (1 - (turn * steps + step) / (rounds * steps)))
            progress.units += BATCH_UNITS
            progress.tokens += BATCH_UNITS * UNIT
        save(work / "checkpoint.pt", trainee, optimizers, progress)
    with torch.no_grad():
        for name, master in trainee.masters.items():
            master.lerp_(before[name], kept)
    save(work / "checkpoint.pt", trainee, optimizers, progress)


def main() -> None:
    """The command ``python -m training.unloop``."""
    parser = argparse.ArgumentParser(description="Train a model not to repeat itself, at the end of its run.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus and the checkpoint")
    parser.add_argument("--rounds", type=int, default=4, help="how often the model writes new texts")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of a round")
    parser.add_argument("--peak", type=float, default=6e-4, help="first learning rate")
    parser.add_argument("--kept", type=float, default=0.2, help="share of the weights from before in the result")
    arguments = parser.parse_args()
    unloop(arguments.work, arguments.rounds, arguments.steps, arguments.peak, arguments.kept)


if __name__ == "__main__":
    main()
