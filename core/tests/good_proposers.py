"""Test proposers that keep the proposer contract. They draft trees, sample draft tokens, use hidden states or have a KV
cache."""

from __future__ import annotations

from itertools import accumulate, pairwise

from attending_proposer import Attending, plan_attending
from attrs import frozen

from specdec_core import Draft, DraftTree, KVLayout, Plan, Proposer, ProposerSpec, Stream, hookimpl
from specdec_core.contracts.draft import DEAD


@frozen
class NoOptions:
    """The config class of a method without options."""


class Branching(Proposer):
    """Drafts a tree: the children of a token are the last two different tokens that followed it in the request. The
    proposer keeps no state."""

    def __init__(self, config, context):
        self.context = context

    def propose(self, batch):
        pairs = zip(batch.requests, batch.max_draft_tokens, strict=True)
        return Draft.from_trees([self.tree(request.token_ids.tolist(), most) for request, most in pairs])

    def tree(self, context, most):
        followers = {}
        for token, follower in pairwise(context):
            followers[token] = [follower, *(f for f in followers.get(token, [])[:1] if f != follower)]
        tokens, parents = [], []
        level = [(-1, context[-1])]
        while level:
            parent, token = level.pop(0)
            for follower in followers.get(token, []):
                if len(tokens) < most:
                    level.append((len(tokens), follower))
                    tokens.append(follower)
                    parents.append(parent)
        return DraftTree(tokens, parents)


class Sampling(Proposer):
    """Samples draft trees from the request's bigram counts.

    The root has three children: two sampled tokens, and the most frequent next token. A sampled chain follows the first
    child. The draft vocabulary is a part of the target's vocabulary, in another order. At temperature 0 every node gets
    the most frequent next token instead.
    """

    NUM_TOKENS = 32

    def __init__(self, config, context):
        import torch

        self.context = context
        self.to_target = (torch.arange(self.NUM_TOKENS) * 5 + 3) % 48
        self.from_target = {token: i for i, token in enumerate(self.to_target.tolist())}

    def propose(self, batch):
        import torch

        tokens, parents, q_rows, rows, lengths = [], [], [], [], []
        for i, request in enumerate(batch.requests):
            counts = self.counts(request.token_ids.tolist())
            root, temperature, budget = (
                int(request.token_ids[-1]),
                float(batch.temperature[i]),
                batch.max_draft_tokens[i],
            )
            drawn = []
            for node in range(budget):
                parent = -1 if node < 3 else 0 if node == 3 else node - 1
                weights = counts[self.from_target.get(root if parent < 0 else drawn[parent], 0)]
                is_sampled = node != 2 and temperature > 0
                if is_sampled and node != 1:
                    rows.append(self.probs(weights, temperature))
                token = self.draw(batch, i, node, rows[-1]) if is_sampled else int(weights.argmax())
                drawn.append(int(self.to_target[token]))
                parents.append(parent)
                q_rows.append(len(rows) - 1 if is_sampled else -1)
            tokens += drawn
            lengths.append(len(drawn))
        return Draft(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            parents=torch.tensor(parents, dtype=torch.int32),
            offsets=(0, *torch.tensor(lengths).cumsum(0).tolist()),
            max_depth=max(1 if n < 4 else n - 1 for n in lengths),
            q=torch.stack(rows).float() if rows else torch.zeros(0, self.NUM_TOKENS),
            q_rows=torch.tensor(q_rows, dtype=torch.int32),
            q_to_target=self.to_target,
            scores=torch.full((len(tokens),), 0.5),
        )

    def counts(self, context):
        import torch

        counts = torch.full((self.NUM_TOKENS, self.NUM_TOKENS), 0.05, dtype=torch.float64)
        for token, follower in pairwise(context):
            if token in self.from_target and follower in self.from_target:
                counts[self.from_target[token], self.from_target[follower]] += 1
        return counts

    def probs(self, weights, temperature):
        powers = weights ** (1 / temperature)
        return powers / powers.sum()

    def draw(self, batch, request, node, probs):
        import torch

        drawn = batch.random.categorical(
            probs.unsqueeze(0), Stream.DRAFT, torch.tensor([request]), torch.tensor([node])
        )
        return int(drawn)


class Fading(Sampling):
    """Samples a chain of draft tokens. The chain ends early after a token that no token has followed yet.

    Shorter chains are padded with dead nodes to max_draft_tokens.
    """

    def propose(self, batch):
        import torch

        tokens, parents, q_rows, rows, depths = [], [], [], [], []
        for i, request in enumerate(batch.requests):
            counts, token = self.counts(request.token_ids.tolist()), int(request.token_ids[-1])
            temperature, budget = float(batch.temperature[i]), batch.max_draft_tokens[i]
            length = 0
            while length < budget and (weights := counts[self.from_target.get(token, 0)]).max() > 1:
                probs = self.probs(weights, max(temperature, 1e-3))
                q_rows.append(len(rows) if temperature > 0 else -1)
                rows += [probs] if temperature > 0 else []
                drawn = self.draw(batch, i, length, probs) if temperature > 0 else int(weights.argmax())
                token = int(self.to_target[drawn])
                tokens.append(token)
                length += 1
            dead = budget - length
            tokens += [0] * dead
            parents += [*range(-1, length - 1), *[DEAD] * dead]
            q_rows += [-1] * dead
            depths.append(length)
        return Draft(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            parents=torch.tensor(parents, dtype=torch.int32),
            offsets=(0, *accumulate(batch.max_draft_tokens)),
            max_depth=max(batch.max_draft_tokens),
            q=torch.stack(rows).float() if rows else torch.zeros(0, self.NUM_TOKENS),
            q_rows=torch.tensor(q_rows, dtype=torch.int32),
            q_to_target=self.to_target,
            is_chain=True,
        )


class Selecting(Sampling):
    """Samples draft tokens from the four likeliest tokens, so that `q`, the draft probabilities, is sparse (q_ids).

    The root has two different children, and a chain follows the first one.
    """

    NUM_SELECTED = 4

    def propose(self, batch):
        import torch

        tokens, parents, q_rows, rows, ids = [], [], [], [], []
        for i, request in enumerate(batch.requests):
            counts, root = self.counts(request.token_ids.tolist()), int(request.token_ids[-1])
            drawn, temperature = [], float(batch.temperature[i])
            for node in range(batch.max_draft_tokens[i]):
                parent = -1 if node < 2 else 0 if node == 2 else node - 1
                if node != 1:
                    weights = counts[self.from_target.get(root if parent < 0 else drawn[parent], 0)]
                    best = weights.topk(self.NUM_SELECTED)
                    rows.append(self.probs(best.values, max(temperature, 1e-3)))
                    ids.append(self.to_target[best.indices])
                left = rows[-1].clone()
                if node == 1:
                    left[ids[-1] == drawn[0]] = 0
                column = self.draw(batch, i, node, left) if temperature > 0 else int(left.argmax())
                drawn.append(int(ids[-1][column]))
                parents.append(parent)
                q_rows.append(len(rows) - 1 if temperature > 0 else -1)
            tokens += drawn
        return Draft(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            parents=torch.tensor(parents, dtype=torch.int32),
            offsets=(0, *accumulate(batch.max_draft_tokens)),
            max_depth=max(batch.max_draft_tokens),
            q=torch.stack(rows).float(),
            q_rows=torch.tensor(q_rows, dtype=torch.int32),
            q_ids=torch.stack(ids),
            with_replacement=False,
        )


class Feeling(Proposer):
    """Drafts a flat tree: the tokens that score highest if the target's LM head is applied to the mean of all hidden
    states of the request so far."""

    def __init__(self, config, context):
        self.context = context
        self.sums = {}  # request id -> (sum of features [hidden], number)

    def start(self, request):
        self.sums[request.id] = (0, 0)

    def observe(self, observation):
        for i, request in enumerate(observation.requests):
            features = observation.features["final"][self.new_rows(observation, i)]
            total, number = self.sums[request.id]
            self.sums[request.id] = (total + features.double().sum(0), number + len(features))

    def new_rows(self, observation, i):
        start = observation.offsets[i]
        return slice(start, start + observation.host_num_valid[i])

    def propose(self, batch):
        import torch

        means = torch.stack([self.sums[request.id][0] / self.sums[request.id][1] for request in batch.requests])
        probs = self.context.output_head(means.float()).softmax(-1)
        best = probs.topk(max(batch.max_draft_tokens)).indices.tolist()
        trees = [DraftTree(tokens[:n], [-1] * n) for tokens, n in zip(best, batch.max_draft_tokens, strict=True)]
        return Draft.from_trees(trees, self.context.device)

    def reset(self, request):
        self.start(request)

    def finish(self, request, reason):
        del self.sums[request.id]


class Addressing(Branching):
    """Drafts like Branching. Reads slot addresses of a KV cache of its own, but never writes to this cache."""

    def propose(self, batch):
        roots = batch.root_positions.tolist()
        metadata = self.context.attention.metadata(batch.requests, [0] * len(roots), roots)
        assert len(metadata.slot_mapping) == sum(roots)
        return super().propose(batch)


def offer(name, build, config=NoOptions, **more):
    more = {"plan": lambda config, target, num_speculative_tokens: Plan(observes=False), "api": 1} | more
    return ProposerSpec(name, config, build, **more)


def plan_features(config, target, num_speculative_tokens):
    return Plan(taps=("final",))


def plan_layers(config, target, num_speculative_tokens):
    return Plan(kv_layout=KVLayout(1, 1, 8, 8, target.dtype), scratch_slots=num_speculative_tokens, observes=False)


@hookimpl
def specdec_proposers():
    return [
        offer("branching", Branching),
        offer("sampling", Sampling),
        offer("fading", Fading),
        offer("selecting", Selecting),
        offer("feeling", Feeling, plan=plan_features),
        offer("addressing", Addressing, plan=plan_layers),
        offer("attending", Attending, plan=plan_attending),
    ]
