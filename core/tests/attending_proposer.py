"""A test proposer with an attention layer and a KV cache of its own. It supports prefix caching."""

from __future__ import annotations

from specdec_core import Draft, DraftTree, KVLayout, Plan, Proposer


class Attending(Proposer):
    """Drafts a flat tree: the tokens that score highest after one layer of attention, all children of the root.

    The key and value in KV-cache slot i depend on tokens i and i + 1, as in EAGLE. The root is the request's last
    token. Its slot is a scratch slot, because the token after the root is not known yet.

    The weights are random and large, so that reading a wrong slot changes the draft.
    """

    WIDTH = 16

    def __init__(self, config, context):
        import torch

        self.context, self.attention = context, context.attention
        noise = torch.Generator().manual_seed(7)
        size = 4, context.target.vocab_size, self.WIDTH
        tables = torch.randn(size, generator=noise).to(context.device, context.target.dtype)
        self.own, self.following, self.queries, self.outputs = tables

    def observe(self, observation):
        lengths = [end - start for start, end in zip(observation.offsets, observation.offsets[1:], strict=False)]
        slots = observation.requests, observation.starts, lengths
        self.store(*slots, observation.token_ids, observation.following_token_ids, observation.positions)
        self.fill(observation)

    def fill(self, observation):
        pairs = zip(observation.starts, observation.host_num_valid, strict=True)
        self.attention.fill(observation.requests, [start + num_valid for start, num_valid in pairs])

    def store(self, requests, starts, lengths, token_ids, following, positions):
        """Store keys and values, computed from tokens, in each request's KV-cache slots [start, start + length).

        token_ids, positions: int64 [sum of lengths]. following: the token after each of token_ids, in the same shape.
        """
        passed = self.pass_over(requests, starts, lengths, token_ids, positions)
        states = (self.own[passed.token_ids] + self.following[following]).unsqueeze(1)
        with self.attention.forwarding(passed.metadata, passed.visibility):
            self.attention.store(0, states, states)

    def pass_over(self, *slots_and_tokens):
        from specdec_core import DraftPass  # imports torch

        return DraftPass.over_tokens(self.attention, *slots_and_tokens)

    def propose(self, batch):
        roots = batch.root_positions
        slots = batch.requests, roots.tolist(), [1] * len(roots)
        passed = self.pass_over(*slots, batch.root_token_ids, roots)
        states, queries = (table[passed.token_ids].unsqueeze(1) for table in (self.own, self.queries))
        with self.attention.forwarding(passed.metadata, passed.visibility):
            attended = self.attention.attend(0, queries, states, states, scaling=0.1)  # to all, not to the best alone
        logits = attended.flatten(1) @ self.outputs.T
        best = logits.topk(max(batch.max_draft_tokens)).indices.tolist()
        trees = [DraftTree(tokens[:n], [-1] * n) for tokens, n in zip(best, batch.max_draft_tokens, strict=True)]
        return Draft.from_trees(trees, self.context.device)


def plan_attending(config, target, num_speculative_tokens, lookahead=1):
    layout = KVLayout(1, 1, Attending.WIDTH, Attending.WIDTH, target.dtype)
    return Plan(kv_layout=layout, scratch_slots=1, lookahead=lookahead)
