"""Relaxed acceptance: accepts draft tokens among the target's likeliest ones. Not lossless."""

from __future__ import annotations

from attrs import frozen

from specdec_core import VerifierSpec, hookimpl, number, option, whole_number


@frozen
class RelaxedConfig:
    """The verifier's keys of speculative_config."""

    relaxed_top_k: int = option(
        whole_number(1), "A draft token is accepted only if it is among this many likeliest tokens.", default=8
    )
    relaxed_ratio: float = option(
        number(0, 1, low_open=True),
        "A draft token is accepted only if it has at least this share of the likeliest token's probability. 1: only "
        "the likeliest token is accepted.",
        default=0.5,
    )


class Relaxed:
    def __init__(self, config):
        self.top_k, self.ratio = config.relaxed_top_k, config.relaxed_ratio

    def verify(self, logits, draft, random):
        import torch

        from specdec_core import trace

        layout, num_rows = draft.layout, len(logits)
        probs = logits.softmax(dim=-1)
        likeliest = probs.topk(min(self.top_k, probs.shape[1])).values
        least = torch.maximum(likeliest[:, -1], self.ratio * likeliest[:, 0])
        of_nodes = probs[layout.parent_rows, draft.token_ids]

        is_kept = torch.ones(num_rows, dtype=torch.bool, device=logits.device)  # roots are
        is_kept[layout.node_rows] = (of_nodes >= least[layout.parent_rows]) & layout.is_alive
        for _ in range(draft.max_depth):  # what is below a rejected node is rejected
            is_kept &= is_kept[layout.up]

        # The deepest kept row of each request; of several, the first.
        keys = layout.row_depths.masked_fill(~is_kept, -1) * num_rows - torch.arange(num_rows, device=logits.device)
        lowest = torch.full((draft.batch_size,), -2 * num_rows, device=logits.device)
        ends = -lowest.scatter_reduce(0, layout.row_requests, keys, "amax") % num_rows

        requests = torch.arange(draft.batch_size, device=logits.device)
        token_ids = random.target_token(probs[ends], requests, layout.row_depths[ends])
        return trace(ends, token_ids, of_nodes > 0, probs[:, 0].isnan(), draft)


@hookimpl
def specdec_verifiers():
    return [VerifierSpec(name="relaxed_acceptance", build=Relaxed, config=RelaxedConfig, lossless=False, api=1)]
