"""All sampling parameters, applied at every node of a draft tree, compared with their definitions row by row."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings, strategies as st
from naive_sampling import histories, naive_logits, naive_probs
from wrong_histories import (
    a_sibling_is_counted,
    ancestors_are_missing,
    presence_is_counted_in_the_prompt,
    the_prompt_counts_as_output,
    the_prompt_is_missing,
    the_root_is_missing,
    the_row_s_own_node_is_missing,
    words_begin_in_the_prompt,
)

from specdec_core import Draft, DraftTree, SamplingParams
from specdec_core.contracts.target import TargetInfo
from specdec_core.engine.request_checks import make_constraints
from specdec_core.sampling.constraints import ConstrainedRows, Constraints, why_not_finite
from specdec_core.sampling.process import process_logits

VOCAB = 9
EOS = frozenset({0, 4})


@frozen
class Ruled:
    """One request of a batch, with its draft tree and its bad words as token ids."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    tree: DraftTree
    bad_words: list[list[int]]

    @property
    def token_ids(self) -> np.ndarray:
        return np.array(self.prompt + self.output)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def constraints(self) -> Constraints | None:
        return Constraints.of(self.params, self.bad_words, EOS)


def cool_the_newest(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
    """A logits processor that lowers the logit of the most recent token. So its result depends on the token order."""
    logits = logits.clone()
    logits[token_ids[-1]] -= 0.25 * len(token_ids)
    return logits


def lean_on_all(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
    logits[int((token_ids * (1 + np.arange(len(token_ids)))).sum()) % len(logits)] += 1.5
    return logits


ASKED: dict[str, st.SearchStrategy] = {
    "min_p": st.sampled_from([0.05, 0.3, 1.0]),
    "top_k": st.integers(1, VOCAB + 1),
    "top_p": st.sampled_from([0.3, 0.85]),
    "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.7, 2.0]),
    "frequency_penalty": st.sampled_from([-1.1, 0.4, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=3),
    "min_tokens": st.integers(1, 6),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
    "ignore_eos": st.booleans(),
    "logits_processors": st.sampled_from([[cool_the_newest], [lean_on_all, cool_the_newest]]),
}
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num_nodes = draw(st.integers(0, 7))
    parents = [draw(st.integers(-2, i - 1)) for i in range(num_nodes)]
    return DraftTree([draw(st.integers(0, 3)) for _ in range(num_nodes)], parents)


@st.composite
def requests(draw: st.DrawFn) -> Ruled:
    names = draw(st.sets(st.sampled_from(sorted(ASKED))))
    asked = {name: draw(ASKED[name]) for name in sorted(names)}
    params = SamplingParams(temperature=draw(st.sampled_from([0.0, 0.8, 1.0])), **asked)
    prompt, output = draw(st.lists(TOKENS, min_size=1, max_size=6)), draw(st.lists(st.integers(0, 3), max_size=6))
    return Ruled(params, prompt, output, draw(trees()), draw(WORDS))


def check(batch: list[Ruled], seed: int, dtype: torch.dtype = torch.float64, tolerance: float = 1e-9) -> None:
    """Assert that every row of processed logits equals the naive implementation's, except rows of dead (padding)
    nodes."""
    draft = Draft.from_trees([request.tree for request in batch])
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(draft.num_nodes + len(batch), VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    given_logits = logits.clone()
    params = [request.params for request in batch]
    processed = process_logits(logits, draft.host_layout.row_requests, params, ConstrainedRows.of(batch, draft))
    assert torch.equal(logits, given_logits), "the given logits were changed"
    assert processed.dtype == dtype
    row = 0
    for request in batch:
        for history in histories(request.token_ids.tolist(), request.tree):
            if history is not None:
                values = naive_logits(
                    logits[row].tolist(), history, len(request.prompt), request.params, request.bad_words, EOS
                )
                check_row(processed[row], values, request.params, all(p.is_greedy for p in params), tolerance)
            row += 1


def check_row(
    processed: torch.Tensor, values: list[float], params: SamplingParams, all_greedy: bool, tolerance: float
) -> None:
    if max(values) == -math.inf:
        assert not processed.amax().isfinite(), "a request without a possible token must fail"
    elif all_greedy:
        assert processed.tolist() == pytest.approx(values, abs=tolerance)
    else:
        probs = processed.softmax(-1).tolist()
        assert probs == pytest.approx(naive_probs(values, params), abs=tolerance)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_row_is_as_the_definitions_say(batch: list[Ruled], seed: int) -> None:
    check(batch, seed)


@settings(max_examples=30, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 2**32))
def test_chains_are_trees(batch: list[Ruled], seed: int) -> None:
    chains = [evolve(r, tree=DraftTree(r.tree.token_ids, list(range(-1, len(r.tree.parents) - 1)))) for r in batch]
    check(chains, seed)


def many(**asked: Any) -> list[Ruled]:
    """Return two requests whose prompt, output and draft tree share tokens. asked: their sampling parameters."""
    params = SamplingParams(**asked)
    tree = DraftTree([1, 2, 1, 3, 3, 2, 1], [-1, -1, 0, 1, 2, -2, 4])
    return [Ruled(params, [5, 6, 1], [7, 2, 8], tree, [[1, 4], [8, 2, 3], [2, 8, 1, 1], [1, 1, 5]]) for _ in range(2)]


def each_in_float32(**asked: Any) -> None:
    check(many(**asked), 1, torch.float32, 1e-5)


def test_float32_stays_float32() -> None:
    each_in_float32(temperature=0.8, min_p=0.1, repetition_penalty=1.2, logit_bias={3: 1.0}, top_p=0.9)
    logits = torch.randn(1, VOCAB, dtype=torch.bfloat16)
    assert process_logits(logits, np.array([0]), [SamplingParams()]).dtype == torch.float32


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = [
    *((mutation, asked)
      for mutation in (ancestors_are_missing, the_row_s_own_node_is_missing, a_sibling_is_counted, the_root_is_missing)
      for asked in ({"frequency_penalty": 0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}, {},
                    {"logits_processors": [lean_on_all]})),
    (the_root_is_missing, {"min_tokens": 4, "stop_token_ids": [7]}),
    (the_prompt_counts_as_output, {"min_tokens": 4, "stop_token_ids": [7]}),
    (the_prompt_is_missing, {"repetition_penalty": 1.5}),
    (presence_is_counted_in_the_prompt, {"presence_penalty": 1.0}),
    (presence_is_counted_in_the_prompt, {"frequency_penalty": 1.0}),
    (words_begin_in_the_prompt, {}),
]  # fmt: skip


@pytest.mark.parametrize(("mutation", "asked"), MUTATIONS, ids=lambda each: getattr(each, "__name__", str(each))[:40])
def test_a_wrong_history_is_noticed(mutation: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = many(temperature=0.8, **asked)
    if mutation is words_begin_in_the_prompt:
        batch = [evolve(request, output=[2], bad_words=[[1, 2, 3]]) for request in batch]
    check(batch, 1)
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check(batch, 1)


SOUND: list[dict[str, Any]] = [
    {"min_p": 0.5},
    {"top_k": 1},
    {"top_p": 0.2},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"logit_bias": {3: 100.0}},
    {"allowed_token_ids": [0, 1, 2]},
    {"stop_token_ids": [3], "min_tokens": 5},
    {"logits_processors": [lean_on_all]},
    {"bad_words": ["whatever makes the token 3 a word"]},
]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("asked", SOUND, ids=lambda asked: next(iter(asked)))
def test_a_row_that_is_not_finite_fails_whatever_hides_it(
    asked: dict[str, Any], temperature: float, wrong: float
) -> None:
    """A row of logits with a NaN or +inf fails even if a sampling parameter masks the token with that logit. No other
    row fails."""
    params = SamplingParams(temperature=temperature, **asked)
    batch = [Ruled(params, [5, 6, 1], [7, 2, 8], DraftTree([1], [-1]), [[3]] if params.bad_words else [])] * 2
    draft = Draft.from_trees([request.tree for request in batch])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = wrong
    constraints = ConstrainedRows.of(batch, draft)
    processed = process_logits(logits, draft.host_layout.row_requests, [params] * 2, constraints)
    assert processed.amax(dim=1).isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_fault_of_a_processor_that_got_zeros_may_be_the_models(is_finite: bool) -> None:
    def careful(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
        raise ValueError("all logits are equal")

    params = SamplingParams(logits_processors=[careful])
    draft = Draft.from_chains([[]])
    constraints = ConstrainedRows.of([Ruled(params, [5], [8], DraftTree([], []), [])], draft)
    assert constraints is not None
    logits = torch.zeros(1, VOCAB) if is_finite else torch.full((1, VOCAB), torch.nan)
    processed = process_logits(logits, draft.host_layout.row_requests, [params], constraints)
    assert processed.isnan().all()
    said = why_not_finite(constraints.constraints[0])
    assert re.fullmatch(r".*careful raised ValueError: all logits are equal(\. Logits processors got zeros .*)?", said)
    assert ("the target's logits were not finite" in said) == (not is_finite)


def test_a_processor_never_gets_logits_that_are_not_finite() -> None:
    """Nor is it blamed for them."""
    seen: list[bool] = []

    def forbidding(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
        seen.append(bool(logits.amax().isfinite()))
        return torch.full_like(logits, -torch.inf)

    params = SamplingParams(logits_processors=[forbidding])
    batch = [Ruled(params, [5], [8], DraftTree([], []), [])] * 2
    draft = Draft.from_trees([request.tree for request in batch])
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = torch.nan
    for batch_index, fault in enumerate(["the logits processors returned", "the target's logits were not finite"]):
        asking = [request if i == batch_index else None for i, request in enumerate(batch)]
        constraints = ConstrainedRows.of(asking, draft)
        assert constraints is not None
        processed = process_logits(logits, draft.host_layout.row_requests, [params] * 2, constraints)
        assert processed[batch_index].isnan().all()
        assert why_not_finite(constraints.constraints[0]).startswith(fault)
    assert seen == [True, True]


def test_a_processor_that_fails_fails_its_own_rows() -> None:
    """If a logits processor raises on some rows of logits, only those rows fail. The error message is kept only for
    the root's row."""

    def careless(logits: torch.Tensor, token_ids: np.ndarray) -> torch.Tensor:
        if token_ids[-1] == 3:
            raise KeyError(3)
        return logits

    params = SamplingParams(logits_processors=[careless])
    nodes = DraftTree([1, 3, 3, 1], [-1, -1, -2, 1])
    batch = [Ruled(params, [5], [8], nodes, []), Ruled(params, [5], [3], nodes, []), Ruled(params, [5], [8], nodes, [])]
    draft = Draft.from_trees([nodes] * 3)
    constraints = ConstrainedRows.of(batch, draft)
    assert constraints is not None
    processed = process_logits(torch.zeros(15, VOCAB), draft.host_layout.row_requests, [params] * 3, constraints)
    finite = [True, True, False, True, True]  # the dead node is not asked about
    assert processed.amax(dim=1).isfinite().tolist() == [*finite, False, *finite[1:], *finite]
    assert [each.fault for each in constraints.constraints] == [
        None,
        f"logits processor {careless.__qualname__} raised KeyError: 3",
        None,
    ]


class WordlessError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def raise_wordless() -> None:
    raise WordlessError


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda logits, token_ids: None, "returned a NoneType: it must return the logits, a tensor"),
        (lambda logits, token_ids: logits.tolist(), "returned a list: it must return the logits, a tensor"),
        (lambda logits, token_ids: logits[:3], r"returned torch.float32 \[3\]: it must return torch.float32 \[9\]"),
        (lambda logits, token_ids: logits.double(), r"returned torch.float64 \[9\]: it must return torch.float32"),
        (lambda logits, token_ids: logits * torch.nan, "returned NaN, or .inf, or -inf for every token"),
        (lambda logits, token_ids: logits - torch.inf, "at least one token must be possible"),
        (
            lambda logits, token_ids: token_ids.__setitem__(0, 1),
            "raised ValueError: assignment destination is read-only",
        ),
        (lambda logits, token_ids: sys.exit(3), "raised SystemExit: 3"),
        (lambda logits, token_ids: raise_wordless(), "raised WordlessError$"),
        (
            lambda logits, token_ids: logits.to_sparse(),
            r"returned torch.float32 \[9\] torch.sparse_coo: it must return",
        ),
        (lambda logits, token_ids: logits.to("meta"), "returned a tensor that cannot be read: NotImplementedError: "),
    ],
)
def test_what_is_wrong_with_a_processor_is_said(processor: Any, says: str) -> None:
    params = SamplingParams(logits_processors=[processor])
    constraints = ConstrainedRows.of([Ruled(params, [5], [], DraftTree([], []), [])], draft := Draft.from_chains([[]]))
    assert constraints is not None
    processed = process_logits(torch.zeros(1, VOCAB), draft.host_layout.row_requests, [params], constraints)
    assert processed.isnan().all()
    fault = why_not_finite(constraints.constraints[0])
    assert re.search(says, fault)
    assert "<lambda>" in fault or "logits processors" in fault


def test_ends_that_the_vocabulary_does_not_have_are_no_ends() -> None:
    target = TargetInfo("tiny", "llama", 20, 8, 1, 64, torch.float32, torch.device("cpu"))
    grammars: Any = None  # the request asks for no structured output
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    asked = make_constraints(params, None, frozenset([-1, 4, 20]), target, grammars)
    assert asked is not None
    assert asked.end_ids.tolist() == [3, 4]
