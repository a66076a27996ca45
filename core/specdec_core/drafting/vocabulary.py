"""Draft vocabularies that have only some of the target's tokens: which ones, and the map of their ids."""

from __future__ import annotations

import torch
from torch import nn

from specdec_core.errors import CompatibilityError


def most_frequent(token_counts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the ids of the `size` most frequent tokens, ascending. Of equally frequent tokens, the lowest ids are
    taken.

    token_counts: int64 [vocab], how often each token occurs in the training texts.
    """
    return token_counts.cpu().argsort(descending=True, stable=True)[:size].sort().values


class DraftVocabulary(nn.Module):
    """The tokens that a draft head in training can draft. It maps the target's token ids to indices in this vocabulary;
    -1: a token that it lacks.

    target_ids: int64 [draft_vocab], ascending.
    vocab_size: number of the target's tokens.
    """

    target_ids: torch.Tensor
    _draft_ids: torch.Tensor  # int64 [vocab]

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        draft_ids = torch.full((vocab_size,), -1, device=target_ids.device)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        self.register_buffer("target_ids", target_ids)
        self.register_buffer("_draft_ids", draft_ids)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._draft_ids[token_ids]

    @property
    def is_drafted(self) -> torch.Tensor:
        """Whether it has each of the target's tokens, bool [vocab]."""
        return self._draft_ids >= 0


def checked_token_map(token_map: torch.Tensor, what: str, vocab_size: int) -> torch.Tensor:
    """Return a checkpoint's map from draft token ids to the target's, int64 [draft_vocab]. Raises CompatibilityError if
    its values are not different whole numbers below vocab_size.

    what: the tensor and its checkpoint, for the error.
    """
    is_whole = not (token_map.is_floating_point() or token_map.is_complex() or token_map.dtype == torch.bool)
    ids = token_map.to(torch.int64) if is_whole else token_map.new_empty(0)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise CompatibilityError(
            f"{what}, {token_map.dtype} {list(token_map.shape)}, does not map to different ids below {vocab_size}: the "
            f"head was trained for another target, or is damaged"
        )
    return ids
