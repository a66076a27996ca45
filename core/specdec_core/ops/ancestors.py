"""Which of a tree's slots a node sees, as bits: the tree attention mask in a form that kernels read with one load."""

from __future__ import annotations

import torch

from specdec_core.contracts.kv import Visibility

WORD = 64
"""Bits of an int64."""


def ancestor_bits(
    visibility: Visibility, token_requests: torch.Tensor, prefix_lens: torch.Tensor, tree_starts: torch.Tensor
) -> torch.Tensor:
    """int64 [num_tokens, ceil(n / 64)]: see `AttentionPlan.ancestors`.

    token_requests int32 [num_tokens], -1: padding. prefix_lens int32 [num_tokens]. tree_starts int32 [num_tokens]: the
    slot that bit 0 stands for. n is visibility.num_tree_slots; where that is None it is counted, and the host waits for
    the device.
    """
    slots = visibility.more_slots
    if slots is None:
        return torch.zeros(len(token_requests), 0, dtype=torch.int64, device=token_requests.device)
    is_seen = (slots >= prefix_lens.unsqueeze(1)) & (token_requests >= 0).unsqueeze(1)
    is_seen[:, 1:] &= slots[:, 1:] != slots[:, :-1]  # the last slot of a path repeats
    bits = torch.where(is_seen, slots - tree_starts.unsqueeze(1), 0)
    num_slots = visibility.num_tree_slots
    if num_slots is None:
        num_slots = int(torch.where(is_seen, bits + 1, 0).max())
    words = torch.zeros(len(slots), -(-num_slots // WORD), dtype=torch.int64, device=slots.device)
    if num_slots:
        words.scatter_add_(1, bits // WORD, is_seen.long() << bits % WORD)
    return words
