"""The loop that grows trees of draft tokens level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.draft import Draft


@frozen(eq=False)
class Level:
    """The draft tokens of one depth, as input of the draft model's next forward pass.

    Each of `requests` has `width` entries; the requests follow each other. A request's entries are in the order of
    their KV-cache slots, which are consecutive. Entries that are no draft tokens are *dead* (padding): they take part
    in the forward pass only to keep shapes fixed. A dead entry has a token id of the vocabulary and a parent among its
    own request's entries. Except in a chain, its only ancestor is itself. It gets no children, is not part of the
    draft, and its slot is overwritten later.

    `ancestors` and `starts` are slots of the draft model's KV cache, counted from the request's first slot for draft
    tokens.

    On a CPU, requests without draft tokens are left out, width is the largest number of draft tokens of a request, and
    these come first: the draft tokens of all depths have consecutive slots. On a GPU all requests stay, width is the
    largest number that a request may have (`may_shrink`), and any entry may be dead.
    """

    width: int
    requests: np.ndarray  # int64 [num_requests]   indices into the batch, ascending; on the host
    rows: torch.Tensor  # int64 [n], n = num_requests * width   the parent's row in the logits it was grown from
    token_ids: torch.Tensor  # int64 [n]   of the target's vocabulary
    ancestors: torch.Tensor  # int64 [n, depth]   numbers of the nodes from depth 1 to the node itself
    starts: Sequence[int]  # [batch]   number of each request's first entry
    is_chain: bool  # every entry's ancestors are all numbers up to its own, those of dead entries too
    is_alive: torch.Tensor | None = None  # bool [n]   None: all are

    @property
    def depth(self) -> int:
        return int(self.ancestors.shape[1])


def may_shrink(device: torch.device) -> bool:
    """Whether a level leaves out requests without draft tokens: True on a CPU. On a GPU the host would have to wait for
    the device to know which requests these are."""
    return device.type == "cpu"


def on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


class TreeGrower(Protocol):
    """Decides from a draft model's logits which draft tokens a tree has: see `grower_of` and `dynamic_grower_of`."""

    def grow(self, logits: torch.Tensor) -> Level | None:
        """Grow a level and return it, as input of the next forward pass; None if no more forward passes are needed.

        logits: float [n, draft_vocab]. In the first call there is a row for each request, later for each entry of the
            last level, padding included.
        """
        ...

    def build(self) -> Draft: ...


def grow(grower: TreeGrower, logits: torch.Tensor, forward: Callable[[Level], torch.Tensor]) -> Draft:
    """Grow a draft, with a forward pass of the draft model or head after each level but the last.

    logits: float [batch, draft_vocab], after the last token of each request.
    forward: runs the forward pass over a level and returns logits float [num_requests * width, draft_vocab].
    """
    level = grower.grow(logits)
    while level is not None:
        level = grower.grow(forward(level))
    return grower.build()
