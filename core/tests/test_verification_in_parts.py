"""A step with many rows of logits is verified in parts. The verdict is that of the whole."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings, strategies as st
from test_verification import verification

from specdec_core import Draft, SamplingParams
from specdec_core.contracts.draft import DEAD
from specdec_core.engine import parts as parts_module, step_memory
from specdec_core.engine.parts import parts_of
from specdec_core.engine.request import Request
from specdec_core.engine.request_checks import make_constraints
from specdec_core.engine.scheduler import Schedule

VOCAB = 6
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1, allowed_token_ids=[0, 2, 3]),
    SamplingParams(temperature=0, presence_penalty=1.5),
    SamplingParams(temperature=1.2, top_k=4, logit_bias={1: 2.0}),
]
rule_of = cache(lambda name: verification(verifier=name))
INFO: Any = SimpleNamespace(vocab_size=VOCAB, max_model_len=64)
NO_GRAMMARS: Any = None  # no request asks for structured output


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Of one to seven requests: trees with chosen, sampled and dead nodes, and empty ones."""
    parents: list[int] = []
    counts, is_chain = [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 7))):
        size = draw(st.integers(0, 5))
        dead = draw(st.integers(0, size))
        tree = [i - 1 if is_chain else draw(st.integers(-1, i - 1)) for i in range(size - dead)]
        parents += [*tree, *[DEAD] * dead]
        counts.append(size)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    num_nodes = len(parents)
    draft = Draft.from_arrays(
        rng.integers(0, VOCAB, num_nodes), np.array(parents, dtype=np.int32), counts, 5, is_chain=is_chain
    )
    if not num_nodes or draw(st.booleans()):
        return draft
    # Each node has a row of its own, or, in chains, also none. Siblings of a tree are drawn one by one.
    q_rows = np.where(rng.random(num_nodes) < 0.3, -1, np.arange(num_nodes)) if is_chain else np.arange(num_nodes)
    q = torch.from_numpy(rng.random((num_nodes, VOCAB), dtype=np.float32)).softmax(-1)
    return evolve(draft, q=q, q_rows=torch.from_numpy(q_rows.astype(np.int32)))


def decided(name: str, draft: Draft, seed: int, kinds: list[int], num_failing: int) -> Any:
    rng = np.random.default_rng(seed)
    schedule = Schedule()
    for i in range(draft.batch_size):
        params = PARAMS[kinds[i % len(kinds)]]
        constraints = make_constraints(params, None, frozenset({0}), INFO, NO_GRAMMARS)
        ids = rng.integers(0, VOCAB, 5 + i)
        request = Request(f"r{i}", ids, params, seed=seed + i, max_total_tokens=60, constraints=constraints)
        request.num_computed = len(ids) - 1
        schedule.add(request, 1)
    logits = torch.from_numpy(rng.normal(0, 2, (draft.num_nodes + draft.batch_size, VOCAB)))
    logits[torch.from_numpy(rng.integers(0, len(logits), num_failing))] = torch.nan
    computed: Any = SimpleNamespace(
        logits=logits, batch=SimpleNamespace(root_positions=torch.arange(draft.batch_size) + 4)
    )
    return rule_of(name).decide(schedule, draft, computed)


def check(name: str, draft: Draft, most_rows: int, seed: int, kinds: list[int], num_failing: int) -> None:
    given = draft, seed, kinds, num_failing
    whole = decided(name, *given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "MOST_LOGITS", most_rows * VOCAB)
        apart = decided(name, *given)
    assert apart.verifier == whole.verifier
    for field in ("token_ids", "num_accepted"):
        assert torch.equal(getattr(apart.verdict, field), getattr(whole.verdict, field)), field
    is_sound = whole.verdict.token_ids[:, 0] >= 0  # the rows of a failed request are not read
    assert torch.equal(apart.verdict.rows[is_sound], whole.verdict.rows[is_sound])


CHOSEN_TREES = Draft.from_arrays(
    np.array([1, 0, 3, 3, 1, 2, 5, 1]), np.array([-1, DEAD, DEAD, DEAD, -1, DEAD, -1, DEAD], np.int32), [4, 2, 2, 0], 5
)


@pytest.mark.parametrize("name", ["auto", "rejection", "traversal", "typical"])
@example(draft=CHOSEN_TREES, most_rows=1, seed=571, kinds=[0, 1], num_failing=1)  # a walk past a NaN differs
@given(
    draft=drafts(), most_rows=st.integers(1, 12), seed=st.integers(0, 999),
    kinds=st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=7), num_failing=st.integers(0, 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_verdict_is_that_of_the_whole(
    name: str, draft: Draft, most_rows: int, seed: int, kinds: list[int], num_failing: int
) -> None:
    check(name, draft, most_rows, seed, kinds, num_failing)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9), most_rows=st.integers(1, 30))
def test_parts_hold_all_requests_in_order_and_no_more_rows_than_allowed(counts: list[int], most_rows: int) -> None:
    draft = Draft.from_chains([[0] * count for count in counts])
    parts = parts_of(draft, most_rows)
    assert [i for part in parts for i in part] == [*range(len(counts))]
    for part in parts:
        assert len(part) == 1 or sum(counts[i] + 1 for i in part) <= most_rows
    for part, following in pairwise(parts):
        assert sum(counts[i] + 1 for i in (*part, following[0])) > most_rows


CHAINS = Draft.from_chains([[1, 2], [], [3], [4, 5, 1]])


@pytest.mark.parametrize("fault", ["rows", "noise", "verifier"])
def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "rows":
        monkeypatch.setattr("specdec_core.engine.verification.first_row_of", lambda draft, part: part.start)
    if fault == "noise":
        cut = parts_module.part_of
        monkeypatch.setattr(
            "specdec_core.engine.verification.part_of", lambda draft, part: cut(draft, range(len(part)))
        )
    if fault == "verifier":  # that of the whole batch, whose greedy rows are masked
        rule = type(verification())
        choose = rule.choose
        monkeypatch.setattr(rule, "choose", lambda self, draft, params: choose(self, draft, [PARAMS[1], *params]))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_seeds(20)


def check_seeds(number: int) -> None:
    for seed in range(number):
        check("auto", CHAINS, 4, seed, [1, 0, 0, 0], 0)
