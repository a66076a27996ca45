"""Verification of deterministic (not sampled) draft tokens: compares each with the target's own draw."""

from __future__ import annotations

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict
from specdec_core.verifiers.accepted_and_bonus import follow, walk

MOST_IN_A_LEVEL = 2**17
"""Logits at the draft tokens of one level, all requests together. Up to this many, a CPU draws a token at every row in
less time than it takes to find the rows that the accepted paths reach."""


class ChosenVerifier:
    """Draws the target's own token after the root (a request's last token) and after every accepted draft token, and
    accepts the child that equals it.

    Random numbers are keyed by the seed and the drawn token's absolute index, so the output equals plain decoding token
    for token, whatever the tree, max_draft_tokens or the batch. `Draft.q` is ignored. So a tree with sampled tokens can
    be verified this way, too, if none of them was dropped.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout = draft.layout
        if logits.device.type == "cpu":
            draws_at_all_rows = draft.num_nodes * logits.shape[1] <= MOST_IN_A_LEVEL * draft.max_depth
        else:
            draws_at_all_rows = draft.is_chain or not draft.num_nodes  # walking would save no row
        if draws_at_all_rows:
            return follow(_drawn(logits, random, layout.row_requests, layout.row_depths), draft)
        return draw_path(logits, draft, random, torch.arange(draft.batch_size, device=logits.device))


def draw_path(logits: torch.Tensor, draft: Draft, random: RandomSource, requests: torch.Tensor) -> Verdict:
    """Verify the drafts of some requests as `ChosenVerifier` does. The verdict of other requests is empty.

    logits: [num_rows, vocab], as a verifier gets them.
    requests: int64, indices into the batch, ascending.
    """

    def pick(rows: torch.Tensor, of: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        return _drawn(logits.index_select(0, rows), random, of, depths)

    return walk(pick, draft, requests)


def _drawn(logits: torch.Tensor, random: RandomSource, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """int64 [n], the target's own token at each of these rows [n, vocab]; -1: the row is not finite."""
    tokens = random.target_token(logits.softmax(dim=-1), requests, depths)
    return tokens.masked_fill(~logits.amax(dim=-1).isfinite(), -1)
