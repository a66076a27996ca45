"""Token Recycling and LogitSpec draft as their papers describe: references know the target from transformers only."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from packages import GREEDY, generate, make_llm

from specdec_core import DEAD, Draft, DraftTree


class Asked(NamedTuple):
    """A request in a call of `propose`, and the tree that it got."""

    id: str
    token_ids: list[int]
    most: int
    tree: DraftTree


Call = list[Asked] | dict[str, list[int]]
"""A call of `propose`, or one of `observe`: {request id: its tokens before the forward pass, the last one its root}."""


def recorded(
    module: str, target: Path, config: dict[str, Any], patch: pytest.MonkeyPatch, fault: Any
) -> tuple[list[Call], Any]:
    """Run all prompts greedily in one batch, and return the proposer's calls in order, and the proposer. fault: what to
    break first."""
    plugin, calls, proposers = importlib.import_module(module), [], []
    proposer = next(each for each in vars(plugin).values() if hasattr(each, "observe") and each.__module__ == module)
    if fault is not None:
        fault(proposer, patch)
    propose, observe = proposer.propose, proposer.observe

    def recording_propose(self: Any, batch: Any) -> Draft:
        draft = propose(self, batch)
        each = zip(batch.requests, batch.max_draft_tokens, strict=True)
        calls.append([Asked(r.id, r.token_ids.tolist(), most, draft.tree(i)) for i, (r, most) in enumerate(each)])
        return draft

    def recording_observe(self: Any, observation: Any) -> None:
        assert observation.top_tokens is not None
        proposers.append(self)
        calls.append({request.id: request.token_ids.tolist() for request in observation.requests})
        observe(self, observation)

    patch.setattr(proposer, "propose", recording_propose)
    patch.setattr(proposer, "observe", recording_observe)
    generate(make_llm(target, config), GREEDY)
    return calls, proposers[0]


@pytest.fixture(scope="module")
def likely(target: Path) -> Callable[[list[int]], list[int]]:
    """Return a function that takes tokens and returns all tokens that may follow, transformers' likeliest first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    @torch.inference_mode()
    def run(token_ids: list[int]) -> list[int]:
        return model(torch.tensor([token_ids])).logits[0, -1].argsort(descending=True).tolist()

    return run


def texts(token_ids: list[int], tree: DraftTree) -> Iterator[list[int]]:
    """Yield what the target's logits after the root and after each node follow: the text up to it."""
    found = [token_ids]
    for token_id, parent in zip(*tree, strict=True):
        found.append([*found[parent + 1], token_id])
    yield from found


SHAPE = [(0,), (0, 0), (1,), (0, 0, 0), (2,), (0, 1), (1, 0)]
"""The seven likeliest paths of ranks below 3, with chances of 0.5, 0.25, 0.19, 0.125, 0.107, 0.095 and 0.095."""


def recycled(root: int, matrix: dict[int, list[int]], most: int) -> DraftTree:
    """Draft by Token Recycling's description: from the root on, look up each node's likeliest next tokens."""
    tree, placed = DraftTree([], []), {(): (-1, root)}
    for path in SHAPE:
        index, token_id = placed.get(path[:-1], (None, None))
        if token_id in matrix and len(tree.token_ids) < most:
            placed[path] = (len(tree.token_ids), matrix[token_id][path[-1]])
            tree.token_ids.append(matrix[token_id][path[-1]])
            tree.parents.append(index)
    return tree


def check_token_recycling(target: Path, likely: Any, patch: pytest.MonkeyPatch, fault: Any = None) -> int:
    config = {"method": "token_recycling", "num_speculative_tokens": len(SHAPE), "token_recycling_top_k": 3}
    matrix: dict[int, list[int]] = {}
    drafted: dict[str, DraftTree] = {}
    seen: set[str] = set()
    num_nodes = 0
    calls, proposer = recorded("token_recycling", target, config, patch, fault)
    for call in calls:
        if isinstance(call, dict):
            for name in call.keys() - seen:
                prompt = call[name]
                matrix |= {prompt[end - 1]: likely(prompt[:end]) for end in range(1, len(prompt))}
            seen |= call.keys()
            for name, token_ids in call.items():
                for text in texts(token_ids, drafted.pop(name, DraftTree([], []))):
                    matrix[text[-1]] = likely(text)
            continue
        for asked in call:
            assert asked.tree == recycled(asked.token_ids[-1], matrix, asked.most)
            drafted[asked.id] = asked.tree
            num_nodes += len(asked.tree.token_ids)
    known = (proposer.likely_after >= 0).all(axis=1).nonzero()[0].tolist()
    assert {token_id: proposer.likely_after[token_id].tolist() for token_id in known} == {
        token_id: likeliest[:3] for token_id, likeliest in matrix.items()
    }
    return num_nodes


def retrieved(token_ids: list[int], guessed: list[int]) -> list[int]:
    """Return what followed the text's longest suffix of at most three tokens when it last occurred."""
    text = token_ids + guessed
    for n in (3, 2, 1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if len(text) >= n and token_ids[end - n : end] == text[-n:]:
                return token_ids[end : end + 6]
    return []


def guessed(token_ids: list[int], likeliest: list[int], most: int) -> DraftTree:
    """Draft by LogitSpec's description: the match after the root, then each guess with the match after it."""
    branches = [retrieved(token_ids, [])]
    for rank, guess in enumerate(likeliest):
        if guess != token_ids[-1]:
            branches.append([guess, *retrieved(token_ids, [guess])][: 4 if rank <= 8 else 3])
    prefixes = [tuple(branch[: i + 1]) for branch in branches for i in range(len(branch))]
    nodes = list(dict.fromkeys(prefixes))[:most]
    return DraftTree([node[-1] for node in nodes], [nodes.index(node[:-1]) if node[1:] else -1 for node in nodes])


def check_logitspec(target: Path, likely: Any, patch: pytest.MonkeyPatch, fault: Any = None) -> int:
    config = {"method": "logitspec", "num_speculative_tokens": 16, "logitspec_top_k": 11}
    num_nodes = 0
    calls, _ = recorded("logitspec", target, config, patch, fault)
    for call in calls:
        for asked in call if isinstance(call, list) else ():
            assert asked.tree == guessed(asked.token_ids, likely(asked.token_ids[:-1])[:11], asked.most)
            num_nodes += len(asked.tree.token_ids)
    return num_nodes


CHECKS = {"token_recycling": check_token_recycling, "logitspec": check_logitspec}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_drafts_are_those_of_a_reference(
    check: Any, target: Path, likely: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(target, likely, monkeypatch) > 50


def test_guesses_come_from_the_end_of_the_accepted_path() -> None:
    """Below the root, token 5, there are two branches, 1 3 and 2 3. The first was accepted, and gave token 4."""
    plugin = importlib.import_module("logitspec")
    rows = [(2, 5, -1, [1, 2]), (3, 1, 0, [3, 6]), (3, 2, 0, [7, 8]), (4, 3, 1, [4, 9]), (4, 3, 2, [8, 7])]
    computed = [plugin.Computed(*row) for row in rows]
    assert plugin.guesses(computed, [0, 0, 5, 1, 3, 4]) == [4, 9]
    assert plugin.guesses(computed, [0, 0, 5, 2, 3, 8]) == [8, 7]
    assert plugin.guesses(computed, [0, 0, 5, 2, 7]) == [7, 8]
    assert plugin.guesses(computed, [0, 0, 5, 1, 3, 4, 4]) == []  # computed without top tokens since


def rejected_nodes_only(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    observe = proposer.observe

    def changed(self: Any, observation: Any) -> None:
        top, parents = observation.top_tokens, observation.top_tokens.parents.clone()
        first = dict(zip(observation.requests, observation.offsets, strict=False))
        for row, (number, position) in enumerate(zip(top.requests.tolist(), top.positions.tolist(), strict=True)):
            index = position - observation.starts[number]
            final = observation.token_ids[first[observation.requests[number]] :][: observation.host_num_valid[number]]
            if index < len(final) and final[index] == top.token_ids[row]:
                parents[row] = DEAD
        observe(self, attrs.evolve(observation, top_tokens=attrs.evolve(top, parents=parents)))

    patch.setattr(proposer, "observe", changed)


def parents_off_by_one(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    propose = proposer.propose

    def changed(self: Any, batch: Any) -> Draft:
        draft = propose(self, batch)
        depth = max(draft.num_nodes_per_request)  # a bound
        return attrs.evolve(draft, parents=(draft.parents - 1).clamp(min=-1), max_depth=depth)

    patch.setattr(proposer, "propose", changed)


def top_tokens_of_another_request(proposer: Any, patch: pytest.MonkeyPatch) -> None:
    observe = proposer.observe

    def changed(self: Any, observation: Any) -> None:
        top = observation.top_tokens
        other = (top.requests + 1) % len(observation.requests)
        observe(self, attrs.evolve(observation, top_tokens=attrs.evolve(top, requests=other)))

    patch.setattr(proposer, "observe", changed)


FAULTS = [
    ("token_recycling", rejected_nodes_only),
    ("token_recycling", parents_off_by_one),
    ("logitspec", parents_off_by_one),
    ("logitspec", top_tokens_of_another_request),
]


@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_faults_are_noticed(
    method: str, fault: Any, target: Path, likely: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        CHECKS[method](target, likely, monkeypatch, fault)


@pytest.mark.parametrize(("num_nodes", "top_k"), [(1, 1), (7, 3), (12, 8), (80, 8), (80, 2)])
def test_the_static_tree_has_the_likeliest_paths(num_nodes: int, top_k: int) -> None:
    static_tree = importlib.import_module("token_recycling").static_tree

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(0.5 / (rank + 1) ** 1.4 for rank in path)

    def likelier(than: float, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        for longer in ((*path, rank) for rank in range(top_k)):
            if chance(longer) > than:
                yield longer
                yield from likelier(than, longer)

    found = static_tree(num_nodes, top_k)
    assert len(set(found)) == num_nodes
    assert set(likelier(min(map(chance, found)) * (1 + 1e-9))) <= set(found)
    assert all(path[:-1] in ((), *found[:i]) for i, path in enumerate(found))
