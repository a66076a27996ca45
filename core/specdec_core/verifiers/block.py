"""Block verification (Sun et al. 2024, algorithm 2): a chain's draft tokens are accepted together, not one by one."""

from __future__ import annotations

import torch

from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Stream, Verdict
from specdec_core.ops.upload import upload
from specdec_core.verifiers.accepted_and_bonus import trace
from specdec_core.verifiers.siblings import Proposals, Siblings, normalize, residual


class BlockVerifier:
    """Draws for each prefix of a chain whether it is accepted, and accepts the longest such prefix. Outputs keep the
    target's distribution, and no other lossless rule for a chain accepts more tokens in expectation. For
    deterministic (not sampled) draft tokens it accepts with the probabilities of rejection sampling."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        layout, siblings, probs = draft.layout, Siblings.of(draft), logits.softmax(dim=-1)
        proposals = Proposals(draft, siblings, logits.shape[-1], logits.dtype)
        depths = torch.arange(draft.max_depth + 1, device=logits.device)
        lengths = upload(draft.num_live_per_request, logits.device).unsqueeze(1)  # [batch, 1]
        rows = layout.root_rows.unsqueeze(1) + torch.minimum(depths, lengths)  # [batch, max_depth + 1]

        def by_row(of_nodes: torch.Tensor) -> torch.Tensor:
            """[num_rows + 1]   numbers of draft tokens, by their rows of target logits; 0 at other rows."""
            return of_nodes.new_zeros(siblings.end + 1).index_copy_(0, layout.node_rows, of_nodes)

        drawn, tokens = proposals.of(layout.node_rows), draft.token_ids.unsqueeze(1)
        ratios = probs[layout.parent_rows].gather(1, tokens) / drawn.gather(1, tokens)
        ratios = by_row(ratios.squeeze(1))[rows]
        prefixes = [torch.ones_like(ratios[:, 0])]  # b in the paper, of each length
        for depth in range(1, len(depths)):
            prefixes.append((prefixes[-1] * ratios[:, depth]).clamp(max=1))
        kept = torch.stack(prefixes, dim=1)  # [batch, max_depth + 1]
        parents = layout.row_requests[layout.node_rows], (layout.row_depths[layout.node_rows] - 1).clamp(min=0)
        missed = residual(kept[parents].unsqueeze(1) * probs[layout.parent_rows], drawn).sum(dim=1)
        missed = by_row(missed)[rows + 1]  # the draft token after a prefix is in the next row

        chances = torch.where(depths == lengths, kept, missed / (missed + 1 - kept))
        chances[:, 0] = 1
        chances = chances.nan_to_num(0).masked_fill(depths > lengths, 0)  # 0 / 0: nothing would be left to draw
        requests = torch.arange(draft.batch_size, device=logits.device)
        keys = requests.repeat_interleave(len(depths)), depths.repeat(draft.batch_size)
        stays = random.bernoulli(chances.flatten(), Stream.ACCEPT, *keys).view_as(chances)
        accepted = torch.where(stays, depths, 0).amax(dim=1)

        ends, at = layout.root_rows + accepted, accepted.unsqueeze(1)
        after = probs[ends]
        rest = residual(kept.gather(1, at) * after, proposals.of(siblings.first_child[ends]))
        weights = torch.where(at == lengths, after, normalize(rest, otherwise=after))
        token = random.categorical(weights, Stream.RECOVER, requests, accepted)
        return trace(ends, token, probs, draft)
