"""A test proposer of random trees. They contain the right continuation often enough for tokens to be both accepted and
rejected.

It also raises an error if the engine breaks the proposer contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from attrs import define, evolve, field, frozen

from specdec_core.contracts.draft import DEAD, Draft, DraftTree
from specdec_core.contracts.proposer import BuildContext, Observation, Plan, ProposerBatch, ProposerSpec, RequestView
from specdec_core.contracts.target import TargetInfo

TRUTH: dict[tuple[int, ...], list[int]] = {}
"""Prompt -> its right output; filled by tests."""


@frozen
class Drafted:
    """Record of one draft tree."""

    request_id: str
    prompt: tuple[int, ...]
    num_tokens: int  # of the request when it was drafted for, the root included
    num_nodes: int  # without its dead tail
    num_right: int  # how many of its nodes a target that continues as TRUTH says must accept


DRAFTED: list[Drafted] = []
FINISHED: dict[str, str] = {}
"""Request id -> the reason that `finish` got."""
FEATURES: dict[str, list[torch.Tensor]] = {}
"""Request id -> its observed hidden states of the tap "final", with the option keep_features."""


def forget_everything() -> None:
    for record in (TRUTH, DRAFTED, FINISHED, FEATURES):
        record.clear()


@frozen
class RandomTreeConfig:
    shape: str = "tree"  # or "chain"
    correct: float = 0.7  # chance that a tree has the right path in it (a chain: that its next node is right)
    full: bool = False  # use the whole budget at every step
    max_depth: int = 32
    observe: bool = True
    keep_features: bool = False
    fails_at_length: int | None = None  # raise when a request has this many tokens
    salt: int | None = None  # a token to put into every tree
    dead_tails: float = 0.5  # chance that a tree fills its budget up with dead nodes


@define
class Seen:
    """What the proposer has observed of one request since the request started or was last preempted."""

    token_ids: list[int] = field(factory=list)
    next_token_id: int | None = None


class RandomTree:
    def __init__(self, config: RandomTreeConfig, context: BuildContext) -> None:
        self.config = config
        self.device = context.device
        self.vocab_size = context.target.vocab_size
        self.limit = context.num_speculative_tokens
        self.seen: dict[str, Seen] = {}

    def start(self, request: RequestView) -> None:
        assert request.id not in self.seen, f"{request.id} was started twice"
        self.seen[request.id] = Seen()

    def reset(self, request: RequestView) -> None:
        assert request.id in self.seen, f"{request.id} was preempted but never started"
        self.seen[request.id] = Seen()
        FEATURES.pop(request.id, None)

    def finish(self, request: RequestView, reason: str) -> None:
        assert reason in ("stop", "length", "abort", "error"), reason
        assert request.id not in FINISHED, f"{request.id} was finished twice"
        self.seen.pop(request.id, None)
        FINISHED[request.id] = reason

    def observe(self, observation: Observation) -> None:
        assert self.config.observe, "observed although the plan says observes=False"
        for i, request in enumerate(observation.requests):
            seen, start = self.seen[request.id], observation.offsets[i]
            valid = slice(start, start + observation.host_num_valid[i])
            if valid.start == valid.stop:  # the forward pass failed: the request ends, or is reset
                continue
            if not seen.token_ids:  # what the cache had is not computed, hence not observed
                seen.token_ids = request.token_ids[: request.num_cached_tokens].tolist()
            assert valid.stop <= observation.offsets[i + 1]
            assert observation.starts[i] == len(seen.token_ids)
            positions = observation.positions[valid].tolist()
            seen_before = len(seen.token_ids)
            assert positions == list(range(seen_before, seen_before + len(positions))), "positions have a gap"
            token_ids = observation.token_ids[valid].tolist()
            assert seen.next_token_id in (None, token_ids[0]), "the next token that was announced did not come"
            seen.token_ids += token_ids
            seen.next_token_id = int(observation.next_token_ids[i])
            if self.config.keep_features:
                FEATURES.setdefault(request.id, []).append(observation.features["final"][valid].clone())

    def propose(self, batch: ProposerBatch) -> Draft:
        trees = []
        assert len(batch.requests) == len(batch.max_draft_tokens) > 0
        for i, request in enumerate(batch.requests):
            self._check(batch, i)
            trees.append(self._draft(request, batch.max_draft_tokens[i]))
        return evolve(Draft.from_trees(trees, self.device), is_chain=self.config.shape == "chain")

    def _check(self, batch: ProposerBatch, i: int) -> None:
        request, token_ids = batch.requests[i], batch.requests[i].token_ids.tolist()
        assert int(batch.root_positions[i]) == len(token_ids) - 1
        assert int(batch.root_token_ids[i]) == token_ids[-1]
        assert 1 <= batch.max_draft_tokens[i] <= self.limit
        if self.config.observe:
            assert self.seen[request.id].token_ids == token_ids[:-1], f"{request.id} was not observed as it is"
            assert self.seen[request.id].next_token_id == token_ids[-1]
        else:
            assert request.id in self.seen, f"{request.id} was never started"

    def _draft(self, request: RequestView, budget: int) -> DraftTree:
        token_ids = request.token_ids.tolist()
        rng = np.random.default_rng([crc32(request.id.encode()), len(token_ids)])
        if len(token_ids) == self.config.fails_at_length:
            raise RuntimeError("a bug in this proposer")
        prompt, output = tuple(token_ids[: request.num_prompt_tokens]), token_ids[request.num_prompt_tokens :]
        truth = TRUTH.get(prompt, [])
        right = truth[len(output) :] if truth[: len(output)] == output else []
        num_nodes = budget if self.config.full else int(rng.integers(0, budget + 1))
        grow = grow_chain if self.config.shape == "chain" else grow_tree
        tree = grow(rng, min(num_nodes, self.config.max_depth), right, self.vocab_size, self.config.correct)
        if self.config.salt is not None:
            tree = salted(tree, self.config.salt, right)
        DRAFTED.append(Drafted(request.id, prompt, len(token_ids), len(tree.token_ids), num_right(tree, right)))
        return with_dead_tail(rng, tree, budget, self.vocab_size) if rng.random() < self.config.dead_tails else tree


def grow_chain(
    rng: np.random.Generator, num_nodes: int, right: Sequence[int], vocab_size: int, correct: float
) -> DraftTree:
    tokens = rng.integers(vocab_size, size=num_nodes).tolist()
    for i in range(min(num_nodes, len(right))):
        if rng.random() < correct:
            tokens[i] = right[i]
    return DraftTree(tokens, list(range(-1, num_nodes - 1)))


def grow_tree(
    rng: np.random.Generator, num_nodes: int, right: Sequence[int], vocab_size: int, correct: float
) -> DraftTree:
    """Make a random draft tree that may contain the right path, down to a random depth.

    The other nodes are wrong tokens, duplicate siblings and dead (padding) nodes.

    right: the tokens that the target will generate.
    correct: the probability that the tree contains the right path.
    """
    tokens: list[int] = []
    parents: list[int] = []
    num_path = int(rng.integers(0, min(num_nodes, len(right)) + 1)) if rng.random() < correct else 0
    path_end, depth = -1, 0
    for i in range(num_nodes):
        if depth < num_path and (num_path - depth >= num_nodes - i or rng.random() < 0.5):
            tokens.append(right[depth])
            parents.append(path_end)
            path_end, depth = i, depth + 1
            continue
        parent = DEAD if rng.random() < 0.1 else int(rng.integers(-1, i)) if rng.random() < 0.7 else path_end
        siblings = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        kind = rng.random()
        if kind < 0.2 and siblings:
            tokens.append(int(rng.choice(siblings)))
        elif kind < 0.4 and right:
            tokens.append(int(rng.choice(right[:4])))  # a right token, most likely in a wrong place
        else:
            tokens.append(int(rng.integers(vocab_size)))
        parents.append(parent)
    return DraftTree(tokens, parents)


def with_dead_tail(rng: np.random.Generator, tree: DraftTree, num_nodes: int, vocab_size: int) -> DraftTree:
    """Pad a tree to num_nodes with dead (padding) nodes. Some of these are children of other dead nodes."""
    length = len(tree.token_ids)
    hanging = [i - 1 if i > length and rng.random() < 0.3 else DEAD for i in range(length, num_nodes)]
    more = rng.integers(vocab_size, size=len(hanging)).tolist()
    return DraftTree([*tree.token_ids, *more], [*tree.parents, *hanging])


def salted(tree: DraftTree, token: int, right: Sequence[int]) -> DraftTree:
    """Replace one token of a tree by `token`, without changing how many tokens of `right` form a path from the root.

    The last node for which this is possible is changed. If there is no such node, the tree is returned unchanged.
    """
    for node in reversed(range(len(tree.token_ids))):
        changed = DraftTree([*tree.token_ids[:node], token, *tree.token_ids[node + 1 :]], tree.parents)
        if num_right(changed, right) == num_right(tree, right):
            return changed
    return tree


def num_right(tree: DraftTree, right: Sequence[int]) -> int:
    """Return how many tokens of `right` (what the target will generate) form a path from the tree's root. Of duplicate
    siblings only the first is followed."""
    node, depth = -1, 0
    for token in right:
        children = [i for i, p in enumerate(tree.parents) if p == node and tree.token_ids[i] == token]
        if not children:
            break
        node, depth = children[0], depth + 1
    return depth


def plan(config: RandomTreeConfig, target: TargetInfo, num_speculative_tokens: int) -> Plan:
    return Plan(taps=("final",) if config.observe else (), observes=config.observe)


RANDOM_TREE = ProposerSpec(name="random_tree", config=RandomTreeConfig, build=RandomTree, api=1, plan=plan)
