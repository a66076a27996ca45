"""Block verification (Sun et al. 2024, algorithm 2): a chain's draft tokens are accepted together, not one by one."""

from __future__ import annotations

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.ops.residuals import MakeResiduals, Residuals
from specdec_core.ops.upload import upload
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Siblings, proposals_of


class BlockVerifier:
    """Draws for each prefix of a chain whether it is accepted, and accepts the longest such prefix. Outputs keep the
    target's distribution, and no other lossless rule for a chain accepts more tokens in expectation. For
    deterministic (not sampled) draft tokens it accepts with the probabilities of rejection sampling.

    residuals: the operation of this name.
    """

    def __init__(self, residuals: MakeResiduals = Residuals) -> None:
        self._residuals = residuals

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout, siblings = draft.layout, Siblings.of(draft)
        target = self._residuals(logits, proposals_of(draft, siblings, logits.shape[-1]))
        is_possible = target.ratios(layout.node_rows) > 0
        depths = torch.arange(draft.max_depth + 1, device=logits.device)
        lengths = upload(draft.num_live_per_request, logits.device).unsqueeze(1)  # [batch, 1]
        rows = layout.root_rows.unsqueeze(1) + torch.minimum(depths, lengths)  # [batch, max_depth + 1]
        ratios = target.ratios(rows.flatten()).view_as(rows)
        prefixes = [torch.ones_like(ratios[:, 0])]  # b in the paper, of each length
        for depth in range(1, len(depths)):
            prefixes.append((prefixes[-1] * ratios[:, depth]).clamp(max=1))
        kept = torch.stack(prefixes, dim=1)  # [batch, max_depth + 1]
        following = torch.where(depths < lengths, rows + 1, siblings.end)  # the draft token after each prefix
        missed = target.missed(following.flatten(), kept.flatten()).view_as(kept)

        chances = torch.where(depths == lengths, kept, missed / (missed + 1 - kept))
        chances[:, 0] = 1
        chances = chances.nan_to_num(0).masked_fill(depths > lengths, 0)  # 0 / 0: nothing would be left to draw
        requests = torch.arange(draft.batch_size, device=logits.device)
        keys = requests.repeat_interleave(len(depths)), depths.repeat(draft.batch_size)
        stays = random.bernoulli(chances.flatten(), Stream.ACCEPT, *keys).view_as(chances)
        accepted = torch.where(stays, depths, 0).amax(dim=1)

        ends = layout.root_rows + accepted
        target.refuse(siblings.first_child[ends], kept.gather(1, accepted.unsqueeze(1)).squeeze(1))
        token = random.categorical(target.weights(ends), Stream.RECOVER, requests, accepted)
        return trace(ends, token, is_possible, target.is_nan, draft)
