"""A complete plugin: drafts, after each token, the token that followed it last time."""

from __future__ import annotations

from itertools import pairwise

from attrs import frozen

from specdec_core import Draft, Plan, Proposer, ProposerSpec, hookimpl, option, whole_number


@frozen
class RecentConfig:
    """The method's keys of speculative_config."""

    recent_max_chain: int = option(whole_number(1), "Most tokens of a draft.", default=8)


class RecentProposer(Proposer):
    def __init__(self, config, device):
        self.max_chain, self.device = config.recent_max_chain, device
        self.followers = {}  # request id -> {token: the token that followed it last}
        self.num_read = {}  # request id -> number of its tokens that were read

    def start(self, request):
        self.followers[request.id], self.num_read[request.id] = {}, 1

    def propose(self, batch):
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_chains([self.chain(request, most) for request, most in pairs], self.device)

    def chain(self, request, most):
        followers, new = self.followers[request.id], request.token_ids[self.num_read[request.id] - 1 :].tolist()
        followers.update(pairwise(new))
        self.num_read[request.id] = len(request.token_ids)
        chain = [new[-1]]  # the root
        while len(chain) <= min(most, self.max_chain) and chain[-1] in followers:
            chain.append(followers[chain[-1]])
        return chain[1:]

    def finish(self, request, reason):
        del self.followers[request.id], self.num_read[request.id]


def plan(config, target, num_speculative_tokens):
    return Plan(observes=False)  # token ids are enough, no hidden states


def build(config, context):
    return RecentProposer(config, context.device)


@hookimpl
def specdec_proposers():
    return [ProposerSpec(name="recent", config=RecentConfig, build=build, plan=plan, api=1)]
