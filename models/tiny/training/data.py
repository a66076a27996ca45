"""Batches of training tokens: shuffled units of 2048 tokens, split into sequences of a length that divides 2048."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

UNIT = 2048
BATCH_UNITS = 4


class Units:
    """The training tokens as shuffled units. The order depends on the seed and the epoch only.

    A unit is 2049 consecutive token ids: 2048 inputs, and one more as the target of the last input.

    path: a file of token ids (.npy), with the weights of their losses beside it (stream.py).
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._ids = np.load(path, mmap_mode="r")
        self._weights = np.load(weights_of(path), mmap_mode="r")
        self._count = (len(self._ids) - 1) // UNIT
        self._seed = seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of BATCH_UNITS consecutive units of the shuffled order, split into sequences.

        first: index of the first unit, counted through all epochs.
        length: tokens of a sequence; a divisor of UNIT.

        Returns token ids, int64 [number of sequences, length + 1], and the weights of the targets, float32 [number of
        sequences, length]. The last id of a sequence is only a target.
        """
        rows, weights = [], []
        for index in range(first, first + BATCH_UNITS):
            epoch, place = divmod(index, self._count)
            if epoch != self._epoch:
                generator = np.random.default_rng([self._seed, epoch])
                self._epoch, self._order = epoch, generator.permutation(self._count)
            begin = int(self._order[place]) * UNIT
            rows += [self._ids[s : s + length + 1] for s in range(begin, begin + UNIT, length)]
            weights += [self._weights[s + 1 : s + length + 1] for s in range(begin, begin + UNIT, length)]
        return torch.from_numpy(np.stack(rows).astype(np.int64)), torch.from_numpy(np.stack(weights)).float()


def weights_of(path: Path) -> Path:
    """Return the file of the weights that belong to a file of token ids."""
    return path.with_name(path.stem + "-weights.npy")


def spread_units(path: Path, count: int) -> torch.Tensor:
    """Return ``count`` units at even distances in a file of token ids, int64 [count, UNIT + 1]."""
    ids = np.load(path, mmap_mode="r")
    begins = np.linspace(0, len(ids) - UNIT - 1, count).astype(int)
    return torch.from_numpy(np.stack([ids[b : b + UNIT + 1] for b in begins]).astype(np.int64))
