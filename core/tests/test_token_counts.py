"""Counts of tokens for penalties, kept from step to step, equal counts from scratch, and a step counts only what is
new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define
from hypothesis import given, settings, strategies as st

from specdec_core import Draft, DraftTree, SamplingParams
from specdec_core.ops.token_counts import TokenCounts
from specdec_core.sampling.constraints import ConstrainedRows, Constraints
from specdec_core.sampling.process import process_logits
from specdec_testing.pretend_cuda import CUDA, PretendCuda

VOCAB = 7


@define
class Counting:
    """A request whose constraints are the same object in every step, as in the engine."""

    token_ids: np.ndarray
    num_prompt_tokens: int
    constraints: Constraints

    @property
    def afresh(self) -> Counting:
        """The same request with constraints that have counted nothing yet."""
        constraints = Constraints.of(self.constraints.params, [], frozenset())
        assert constraints is not None
        return Counting(self.token_ids, self.num_prompt_tokens, constraints)


def request_of(prompt: list[int], params: SamplingParams) -> Counting:
    constraints = Constraints.of(params, [], frozenset())
    assert constraints is not None
    return Counting(np.array(prompt), len(prompt), constraints)


def processed(requests: list[Counting], trees: list[DraftTree], logits: torch.Tensor) -> torch.Tensor:
    draft = Draft.from_trees(trees)
    params = [request.constraints.params for request in requests]
    return process_logits(logits, draft.host_layout.row_requests, params, ConstrainedRows.of(requests, draft))


PENALTIES = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.9, -0.4]),
)
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num_nodes = draw(st.integers(0, 6))
    parents = [draw(st.integers(-2, i - 1)) for i in range(num_nodes)]
    return DraftTree([draw(TOKENS) for _ in range(num_nodes)], parents)


@st.composite
def steps(draw: st.DrawFn, num_requests: int) -> list[tuple[bool, DraftTree, list[int]]]:
    """One step: for each request whether it is scheduled (it may wait after a preemption), its tree, and the tokens
    that verification appends: an accepted path and another token, or nothing."""
    step = []
    for _ in range(num_requests):
        tree, path = draw(trees()), list[int]()
        node = draw(st.integers(-1, len(tree.token_ids) - 1))
        while node >= 0:
            path.insert(0, tree.token_ids[node])
            node = tree.parents[node]
        step.append((draw(st.booleans()), tree, draw(st.sampled_from([[], [*path, draw(TOKENS)]]))))
    return step


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Counting], list[Any]]:
    prompts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=3))
    requests = [request_of(prompt, draw(PENALTIES)) for prompt in prompts]
    return requests, draw(st.lists(steps(len(requests)), min_size=2, max_size=6))


def compare(requests: list[Counting], plan: list[Any]) -> None:
    for number, step in enumerate(plan):
        scheduled = [(r, tree) for r, (is_scheduled, tree, _) in zip(requests, step, strict=True) if is_scheduled]
        if scheduled:
            given_requests, given_trees = map(list, zip(*scheduled, strict=True))
            num_rows = sum(len(tree.token_ids) + 1 for tree in given_trees)
            logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(number))
            kept = processed(given_requests, given_trees, logits)
            assert torch.equal(kept, processed([r.afresh for r in given_requests], given_trees, logits))
        for request, (is_scheduled, _, appended) in zip(requests, step, strict=True):
            if is_scheduled:
                request.token_ids = np.concatenate([request.token_ids, appended]).astype(np.int64)


@settings(max_examples=100, deadline=None)
@given(runs())
def test_kept_counts_equal_counts_from_scratch(run: tuple[list[Counting], list[Any]]) -> None:
    compare(*run)


Read = Callable[..., np.ndarray]


def read_all_again(read: Read) -> Read:
    def again(self: TokenCounts, *tokens: Any) -> np.ndarray:
        self._num_read = 0
        return read(self, *tokens)

    return again


def skip_one(read: Read) -> Read:
    def skipping(self: TokenCounts, *tokens: Any) -> np.ndarray:
        new = read(self, *tokens)
        self._num_read += 1
        return new

    return skipping


def forget_new_ids(read: Read) -> Read:
    def forgetting(self: TokenCounts, *tokens: Any) -> np.ndarray:
        is_first = not self._occurs.any()
        new = read(self, *tokens)
        if not is_first:
            self._new_ids.clear()
        return new

    return forgetting


@pytest.mark.parametrize("fault", [read_all_again, skip_one, forget_new_ids])
def test_comparison_notices(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.9)
    tree = DraftTree([1, 2, 1], [-1, 0, 1])
    plan = [[(True, tree, [1, 2, 5])], [(True, tree, [3])], [(True, tree, [1, 1, 6])], [(True, tree, [])]]
    compare([request_of([4, 1], params)], plan)
    monkeypatch.setattr(TokenCounts, "read", fault(TokenCounts.read))
    with pytest.raises(AssertionError):
        compare([request_of([4, 1], params)], plan)


def test_a_step_counts_only_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step at 32k tokens of context copies a few dozen numbers to the device: new tokens, rows and parameters."""
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.7)
    tokens = np.random.default_rng(0).integers(0, 5000, 32768)

    def uploads_of_steps(request: Counting) -> list[int]:
        found: list[int] = []
        with PretendCuda() as pretend:
            for length in range(32700, 32720, 4):
                request.token_ids = tokens[:length]
                draft = Draft.from_chains([[1, 2, 3]], CUDA)
                rows = ConstrainedRows.of([request], draft)
                requests = draft.host_layout.row_requests
                del pretend.uploads[:]
                process_logits(torch.zeros(4, 5000, device=CUDA), requests, [params], rows)
                found.append(sum(pretend.uploads))
        return found

    first, *later = uploads_of_steps(request_of(tokens[:100].tolist(), params))
    assert first > 32000
    assert max(later) < 100
    monkeypatch.setattr(TokenCounts, "read", read_all_again(TokenCounts.read))
    assert min(uploads_of_steps(request_of(tokens[:100].tolist(), params))) > 32000
