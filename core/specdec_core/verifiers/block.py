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
        probs = logits.softmax(dim=-1)
        layout, siblings = draft.layout, Siblings.of(draft)
        proposals = Proposals(draft, siblings, logits.shape[-1], logits.dtype)
        requests = torch.arange(draft.batch_size, device=logits.device)
        lengths = upload(draft.num_live_per_request, logits.device)

        accepted = torch.zeros_like(lengths)  # length of the longest prefix so far that was accepted
        kept = torch.ones(draft.batch_size, dtype=logits.dtype, device=logits.device)  # b in the paper
        weights = probs[layout.root_rows]  # of the token after that prefix, up to a factor
        for depth in range(draft.max_depth + 1):
            row = layout.root_rows + lengths.clamp(max=depth)
            is_last = lengths == depth
            child = siblings.first_child[row]
            here = kept.unsqueeze(1) * probs[row]
            rest = residual(here, proposals.of(child))
            missed = rest.sum(dim=1)
            chance = torch.where(is_last, kept, missed / (missed + 1 - kept)) if depth else torch.ones_like(kept)
            chance = chance.nan_to_num(0).masked_fill(lengths < depth, 0)  # 0 / 0: nothing would be left to draw
            stays = random.bernoulli(chance, Stream.ACCEPT, requests, torch.full_like(requests, depth))
            accepted = torch.where(stays, depth, accepted)
            after = torch.where(is_last.unsqueeze(1), probs[row], normalize(rest, otherwise=probs[row]))
            weights = torch.where(stays.unsqueeze(1), after, weights)
            own = probs[row].gather(1, proposals.token_ids(child).unsqueeze(1)).squeeze(1)
            kept = torch.where(lengths > depth, (kept * own / proposals.own_probs[child]).clamp(max=1), kept)
        token = random.categorical(weights, Stream.RECOVER, requests, accepted)
        return trace(layout.root_rows + accepted, token, probs, draft)
