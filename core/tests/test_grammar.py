"""Masks of a grammar are those of each row's own path, and drafts under a grammar are verified without a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grammar_faults import drafts_count_as_output, the_parent_s_mask
from hypothesis import given, settings, strategies as st
from table_grammar import Table, TableMatcher, allowed_after, random_table

from specdec_core import Draft, DraftTree, SamplingParams, StructuredOutputs
from specdec_core.contracts.draft import DEAD
from specdec_core.sampling.constraints import ConstrainedRows, Constraints, why_not_finite
from specdec_core.sampling.grammar_state import GrammarState
from specdec_core.sampling.process import process_logits
from specdec_core.verifiers.block import BlockVerifier
from specdec_core.verifiers.chosen import ChosenVerifier
from specdec_core.verifiers.rejection import RejectionVerifier
from specdec_core.verifiers.traversal import TraversalVerifier
from specdec_testing.drawn_trees import SAMPLED, Model, Shape, emit, random_model, target_logits

PROMPT = 3
PARAMS = SamplingParams(temperature=1, structured_outputs=StructuredOutputs(regex="stands for the table"))


def request_of(make: Callable[[], Any], output: Sequence[int] = (), params: SamplingParams = PARAMS) -> Any:
    constraints = Constraints.of(params, [], frozenset(), GrammarState(make, vocab_size=8))
    return SimpleNamespace(
        constraints=constraints, token_ids=np.array([1] * PROMPT + list(output)), num_prompt_tokens=PROMPT
    )


def processed(logits: torch.Tensor, draft: Draft, requests: Sequence[Any]) -> torch.Tensor:
    rows = ConstrainedRows.of(requests, draft)
    return process_logits(logits, draft.host_layout.row_requests, [PARAMS] * len(requests), rows)


class Constrained:
    """A verifier that gets the logits of `target` under the grammar, whatever it is called with."""

    def __init__(self, verifier: Any, target: Model, request: Any) -> None:
        self.verifier, self.target, self.request = verifier, target, request

    def verify(self, logits: torch.Tensor, draft: Draft, random: Any) -> Any:
        return self.verifier.verify(processed(target_logits(self.target, draft), draft, [self.request]), draft, random)


def renormalized(target: Model, table: Table, output: Sequence[int]) -> Model:
    """The target with the probabilities of forbidden tokens set to 0. What follows a forbidden one does not matter."""
    found = {}
    for history, probs in target.items():
        allowed = allowed_after(table, [*output, *history])
        kept = probs * [allowed is None or token in allowed for token in range(len(probs))]
        found[history] = kept / kept.sum()
    return found


def largest_error(verifier: Any, shape: Shape, seed: int) -> float:
    """The largest difference between an output's exact probability and that under the renormalized target."""
    vocab, table = 3, random_table(3, 4, seed)
    target, q = (random_model(vocab, shape.depth + 1, 10 * seed + i, impossible=0) for i in range(2))
    output: list[int] = []
    while len(output) < 3:
        output.append(min(allowed_after(table, output) or ()))
    request = request_of(lambda: TableMatcher(table), output)
    return emit(Constrained(verifier, target, request), renormalized(target, table, output), q, shape).error


SHAPES = {
    "sampled chain": (Shape((-1, 0, 1), (SAMPLED,) * 3, is_chain=True), (BlockVerifier, RejectionVerifier)),
    "sampled tree": (Shape((-1, -1, 0, 1), (SAMPLED,) * 4), (TraversalVerifier, RejectionVerifier)),
    "without replacement": (Shape((-1, -1, 1), (SAMPLED,) * 3, with_replacement=False), (TraversalVerifier,)),
    "chosen beside sampled": (Shape((-1, -1, 0, 1), (SAMPLED, 2, 1, SAMPLED)), (TraversalVerifier,)),
    "dead nodes": (Shape((-1, DEAD, 0, 1, 2), (SAMPLED, 1, SAMPLED, 0, 2)), (TraversalVerifier,)),
    "chosen tree": (Shape((-1, -1, -1, 0, 0, 1, 2), (0, 1, 2, 1, 2, 0, 2)), (ChosenVerifier,)),
}


@pytest.mark.parametrize(("shape", "verifiers"), SHAPES.values(), ids=SHAPES.keys())
def test_the_distribution_is_the_target_s_renormalized(shape: Shape, verifiers: Sequence[Any]) -> None:
    for verifier in verifiers:
        for seed in range(6):
            assert largest_error(verifier(), shape, seed) < 1e-12


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableMatcher, "rollback", lambda self, num_tokens: None)


@pytest.mark.parametrize("mutation", [the_parent_s_mask, no_rollback, drafts_count_as_output])
@pytest.mark.parametrize("name", ["sampled tree", "chosen tree"])
def test_a_wrong_mask_is_noticed(mutation: Callable[..., None], name: str) -> None:
    shape, (verifier, *_) = SHAPES[name]
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        assert any(largest_error(verifier(), shape, seed) > 1e-3 for seed in range(12))


trees = st.lists(st.tuples(st.integers(-2, 6), st.integers(0, 39)), max_size=8).map(
    lambda nodes: DraftTree([token for _, token in nodes], [min(p, i - 1) for i, (p, _) in enumerate(nodes)])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(trees, min_size=2, max_size=2), min_size=1, max_size=4), st.integers(0, 10**6))
def test_masks_are_those_of_each_path(steps: list[list[DraftTree]], seed: int) -> None:
    """Over several steps of a batch of three, of which two requests have grammars. Their outputs grow in between."""
    rng = np.random.default_rng(seed)
    vocab, tables = 40, [random_table(40, 5, seed + i) for i in range(2)]
    requests = [request_of(lambda table=table: TableMatcher(table)) for table in tables]
    requests.insert(1, SimpleNamespace(constraints=None, token_ids=np.array([1]), num_prompt_tokens=1))
    for first, last in steps:
        batch = [first, DraftTree([5, 6], [-1, 0]), last]
        draft, position = Draft.from_trees(batch), 0
        logits = torch.randn(draft.num_nodes + 3, vocab, dtype=torch.float64)
        found = processed(logits, draft, requests)
        for request, tree, table in zip(requests, batch, [tables[0], None, tables[1]], strict=True):
            paths: list[list[int]] = [[]]
            for token, parent in zip(*tree, strict=True):
                is_dead = parent == DEAD or (parent >= 0 and paths[parent + 1] == ["dead"])
                paths.append(["dead"] if is_dead else [*paths[parent + 1], token])
            for path in paths:
                own, kept = logits[position].clone(), found[position].isfinite()
                if table is not None:
                    output = request.token_ids[PROMPT:].tolist()
                    allowed = allowed_after(table, [*output, *([] if path == ["dead"] else path)])
                    expected = set(range(vocab)) if allowed is None else allowed
                    assert set(kept.nonzero().flatten().tolist()) == expected
                else:
                    assert bool(kept.all())
                assert torch.equal(found[position][kept], own[kept])
                position += 1
        for request, table in ((requests[0], tables[0]), (requests[2], tables[1])):
            for _ in range(int(rng.integers(3))):
                allowed = allowed_after(table, request.token_ids[PROMPT:].tolist())
                request.token_ids = np.append(request.token_ids, rng.choice(sorted(allowed or ())))


class Failing(TableMatcher):
    """Fails after token 1, for good."""

    def fill(self, mask: np.ndarray) -> None:
        if len(self.states) > 1 and self.states[-1] == 1:
            raise RuntimeError("too complex")
        super().fill(mask)


def test_a_matcher_that_fails_spoils_its_own_rows_only() -> None:
    table: Table = [{0: 0, 1: 1}, {0: 0}]
    made: list[Failing] = []

    def make() -> Failing:
        made.append(Failing(table))
        return made[-1]

    request = request_of(make)
    draft = Draft.from_trees([DraftTree([0, 1, 0, 0], [-1, -1, 1, 0])])
    found = processed(torch.zeros(5, 3), draft, [request])
    assert found.isfinite().tolist() == [[True, True, False]] * 2 + [[False] * 3] + [[True, True, False]] * 2
    assert len(made) == 2, "a matcher that failed is not asked again"
    assert request.constraints.fault is None, "not on the logits after the last token"
    request.token_ids = np.append(request.token_ids, 1)
    found = processed(torch.zeros(1, 3), Draft.from_chains([[]]), [request])
    assert bool(found.isnan().all())
    assert why_not_finite(request.constraints) == ("structured_outputs cannot be followed: RuntimeError: too complex")


def test_logits_processors_cannot_allow_what_the_grammar_forbids() -> None:
    params = SamplingParams(logits_processors=[lambda logits, token_ids: torch.zeros_like(logits)])
    request = request_of(lambda: TableMatcher([{2: 0}]), params=params)
    found = processed(torch.zeros(1, 4), Draft.from_chains([[]]), [request])
    assert found.isfinite().tolist() == [[False, False, True, False]]
