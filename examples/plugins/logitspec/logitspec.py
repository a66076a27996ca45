"""LogitSpec (Liu et al. 2025, https://arxiv.org/abs/2507.01449): the logits that gave a request's last token also hint
at the token after it. Each of these guesses is continued as the same n-gram was continued earlier in the request."""

from __future__ import annotations

from typing import NamedTuple

from attrs import Factory, define, frozen

from specdec_core import Draft, DraftTree, Plan, Proposer, ProposerSpec, hookimpl, option, whole_number


@frozen
class LogitSpecConfig:
    """The method's keys of speculative_config."""

    logitspec_top_k: int = option(
        whole_number(1, 256), "How many of the target's likeliest tokens to try as the next one.", default=32
    )
    logitspec_max_ngram: int = option(
        whole_number(1), "Longest suffix to look for earlier in the request, in tokens.", default=3
    )


class Computed(NamedTuple):
    """A root or draft token that the target has computed."""

    position: int
    token_id: int
    parent: int  # index among those of the same forward pass; negative: it is the root
    likely: list[int]  # tokens after it, the likeliest first


@define
class State:
    """What is stored of a request."""

    ends: dict = Factory(dict)  # {n-gram: the index of the token after its last occurrence}
    num_read: int = 1  # the n-grams that end before this index are in `ends`
    computed: list = Factory(list)  # [Computed], in the last forward pass


def branch_length(rank):
    """Return the number of draft tokens in the branch of a guess. rank: among the target's likeliest tokens, from 0."""
    return 4 if rank <= 8 else 3 if rank <= 32 else 1


LONGEST_MATCH = 6
"""Most draft tokens of the match after the root, to which no guess belongs."""


class LogitSpec(Proposer):
    def __init__(self, config, context):
        self.max_ngram, self.device = config.logitspec_max_ngram, context.device
        self.states = {}  # {request id: State}

    def start(self, request):
        self.states[request.id] = State()

    def observe(self, observation):
        top = observation.top_tokens
        if top is None:  # drafting was turned off for these requests
            return
        first = {}
        columns = (top.requests, top.positions, top.token_ids, top.parents, top.ids)
        for row, (number, *computed, parent, likely) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if number not in first:
                first[number] = row
                self.states[observation.requests[number].id].computed = []
            own = self.states[observation.requests[number].id].computed
            own.append(Computed(*computed, parent - first[number] if parent >= 0 else parent, likely))

    def propose(self, batch):
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_trees([self.tree(request, most) for request, most in pairs], self.device)

    def tree(self, request, most):
        state, token_ids = self.states[request.id], request.token_ids.tolist()
        for end in range(state.num_read, len(token_ids)):
            for n in range(1, min(self.max_ngram, end) + 1):
                state.ends[tuple(token_ids[end - n : end])] = end
        state.num_read = len(token_ids)
        tree = Branches(most)
        tree.add(self.match(state, token_ids, [])[:LONGEST_MATCH])
        for rank, guess in enumerate(guesses(state.computed, token_ids)):
            if guess != token_ids[-1]:
                tree.add([guess, *self.match(state, token_ids, [guess])][: branch_length(rank)])
        return tree.tree

    def match(self, state, token_ids, guessed):
        """Return what followed the longest n-gram that ends the text and occurred before. guessed: the text's last
        tokens, after token_ids."""
        suffix = [*token_ids[-self.max_ngram :], *guessed][-self.max_ngram :]
        for begin in range(len(suffix)):
            if end := state.ends.get(tuple(suffix[begin:])):
                return token_ids[end : end + LONGEST_MATCH]
        return []

    def reset(self, request):
        self.states[request.id].computed = []

    def finish(self, request, reason):
        self.states.pop(request.id, None)


def guesses(computed, token_ids):
    """Return the likeliest tokens in the logits that gave a request's last token, or nothing if they are not known.

    computed: [Computed], of which those with the request's own tokens are a path from the root.
    """
    last = -1  # the root's parent
    for number, node in enumerate(computed):
        is_known = node.position < len(token_ids) - 1 and token_ids[node.position] == node.token_id
        if is_known and node.parent == last:
            last = number
    found = last >= 0 and computed[last].position == len(token_ids) - 2
    return computed[last].likely if found else []


class Branches:
    """A draft tree, made of branches that begin at the root. Equal beginnings become one."""

    def __init__(self, most):
        self.most, self.tree, self.nodes = most, DraftTree([], []), {}

    def add(self, branch):
        at = -1
        for token_id in branch:
            if (at, token_id) not in self.nodes:
                if len(self.tree.token_ids) == self.most:
                    return
                self.nodes[at, token_id] = len(self.tree.token_ids)
                self.tree.token_ids.append(token_id)
                self.tree.parents.append(at)
            at = self.nodes[at, token_id]


def plan(config, target, num_speculative_tokens):
    return Plan(top_tokens=config.logitspec_top_k)


@hookimpl
def specdec_proposers():
    return [
        ProposerSpec(
            name="logitspec",
            config=LogitSpecConfig,
            build=LogitSpec,
            plan=plan,
            num_speculative_tokens=lambda config, device: 12 if device.type == "cpu" else 63,
            api=1,
        )
    ]
