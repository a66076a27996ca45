"""Batches of training texts. The texts in a batch depend only on the seed and the step, so a resumed run needs no saved
position in the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field

from specdec_train.data import Text

WINDOW = 16
"""Number of batches whose texts are sorted by length together, to reduce padding."""


@define
class Order:
    """Decides which texts are in the batch of each training step.

    lengths: number of tokens of each text.
    batch: number of texts per step.
    seed: the seed of the random order, which differs from epoch to epoch.
    """

    lengths: tuple[int, ...]
    batch: int
    seed: int
    _known: tuple[int, list[list[int]]] = field(default=(-1, []), init=False)  # an epoch and its batches

    @property
    def batches_per_epoch(self) -> int:
        return max(1, len(self.lengths) // self.batch)

    def rows(self, step: int) -> list[int]:
        """Return the indices of the texts in the batch of a training step. Steps count from 0 over all epochs."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._known[0] != epoch:
            self._known = epoch, self._batches(epoch)
        return self._known[1][index]

    def _batches(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, epoch])
        # Those of an incomplete batch are left out before sorting: else they would be the longest.
        shuffled = random.permutation(len(self.lengths))[: self.batches_per_epoch * self.batch].tolist()
        window = WINDOW * self.batch
        batches = []
        for start in range(0, len(shuffled), window):
            alike = sorted(shuffled[start : start + window], key=lambda row: self.lengths[row])
            batches += [alike[i : i + self.batch] for i in range(0, len(alike), self.batch)]
        return [batches[i] for i in random.permutation(len(batches))]


def collate(texts: Sequence[Text], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids (int64) and the loss masks (bool) of texts, both [number of texts, length of the longest
    text]. Shorter texts are padded at the end, with token id 0 and mask False."""
    length = max(len(text.token_ids) for text in texts)
    token_ids = torch.zeros(len(texts), length, dtype=torch.int64)
    counts = torch.zeros(len(texts), length, dtype=torch.bool)
    for i, text in enumerate(texts):
        token_ids[i, : len(text.token_ids)] = torch.from_numpy(text.token_ids.astype(np.int64))
        counts[i, : len(text.counts)] = torch.from_numpy(text.counts)
    return token_ids.to(device), counts.to(device)
