"""Temperature, top-k and top-p compared with transformers, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec_core import Draft, SamplingParams
from specdec_core.ops import argmax, truncation
from specdec_core.sampling.process import process_logits
from specdec_core.sampling.random import CounterRandom
from specdec_core.verifiers.greedy import GreedyVerifier


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities [vocab] that transformers computes from logits [vocab]."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits.unsqueeze(0))[0].softmax(-1)


settings_of_a_request = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 40, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(settings_of_a_request, st.integers(1, 4)), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_row_is_processed_as_its_request_asks(requests: list, seed: int) -> None:
    params = [wanted for wanted, _ in requests]
    row_requests = np.array([i for i, (_, rows) in enumerate(requests) for _ in range(rows)])
    logits = 3 * torch.randn(len(row_requests), 97, generator=torch.Generator().manual_seed(seed))
    processed = process_logits(logits.clone(), row_requests, params)
    for row, request in enumerate(row_requests.tolist()):
        if all(p.temperature == 0 for p in params):
            assert processed[row].argmax() == logits[row].argmax()
        else:
            torch.testing.assert_close(processed[row].softmax(-1), reference(logits[row], params[request]))


def test_greedy_beside_sampled_is_a_point_mass() -> None:
    logits = torch.randn(2, 11)
    processed = process_logits(logits, np.array([0, 1]), [SamplingParams(temperature=0), SamplingParams()])
    assert processed[0].isfinite().sum() == 1
    assert processed[0].argmax() == logits[0].argmax()


def test_all_tokens_stay_beside_a_request_with_top_p() -> None:
    """A request with top_p=1 keeps every token, although the sum of rounded probabilities may reach 1 before the last
    token."""
    logits = torch.randn(2, 151936, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[0]
    kept = process_logits(logits, np.arange(2), [SamplingParams(), SamplingParams(top_p=0.9)]).isfinite()
    assert bool(kept[0].all())
    assert not bool(kept[1].all())


def sorted_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return which tokens of a row top-p keeps, by sorting all of them; of equal ones, the first come first."""
    order = logits.argsort(descending=True, stable=True)
    probs = logits.softmax(-1)[order]
    kept = probs.cumsum(0) - probs < top_p
    kept[0] = True
    return torch.zeros_like(kept).scatter_(0, order, kept)


def check_top_p(logits: torch.Tensor, top_ps: list[float]) -> None:
    params = [SamplingParams(top_p=top_p) for top_p in top_ps]
    kept = process_logits(logits, np.arange(len(top_ps)), params).isfinite()
    for row, top_p in enumerate(top_ps):
        assert torch.equal(kept[row], sorted_top_p(logits[row], top_p)), (row, top_p)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.05, 0.5, 0.9, 0.999]), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
def test_top_p_of_the_likeliest_is_that_of_all(top_ps: list[float], seed: int, are_equal: bool) -> None:
    """In rows with many equal logits, and in rows that need more tokens than are sorted at first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(top_ps), 3 * truncation.LIKELIEST, generator=generator)
    logits *= torch.rand(len(top_ps), 1, generator=generator) * 6
    check_top_p(logits.round() if are_equal else logits, top_ps)


def test_top_p_without_a_second_look_or_with_all_equal_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(2, 3 * truncation.LIKELIEST, generator=torch.Generator().manual_seed(0)) / 10
    equal = torch.zeros(1, 4)
    check_top_p(flat, [0.9, 0.999])
    check_top_p(equal, [0.5])
    cut_at, cumsum = truncation._cut_at, torch.Tensor.cumsum
    with monkeypatch.context() as patch:
        always = torch.ones(2, dtype=torch.bool)
        patch.setattr(truncation, "_cut_at", lambda *args: (*cut_at(*args)[:2], always))
        with pytest.raises(AssertionError):
            check_top_p(flat, [0.9, 0.999])
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda self, dim, **dtype: cumsum(self, dim, **dtype) * (self.dtype != torch.bool)
    )
    with pytest.raises(AssertionError):
        check_top_p(equal, [0.5])


def test_equal_logits_are_cut_alike() -> None:
    """With top_k, all tokens tied at the k-th place are kept. With top_p, the likeliest token is kept even if its
    probability exceeds top_p."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    row = np.array([0])
    assert process_logits(logits, row, [SamplingParams(top_k=2)]).isfinite().tolist() == [[True, True, True, False]]
    assert process_logits(logits, row, [SamplingParams(top_p=1e-6)]).isfinite().sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_stays_so(temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = torch.nan
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=1.0, top_k=2, top_p=0.5)]
    processed = process_logits(logits, np.array([0, 1]), params)
    assert not processed[0].amax().isfinite()
    assert processed[1].amax().isfinite()


class Shapes(TorchDispatchMode):
    """Records the number of rows that each call of the costly operations gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("sort", "topk", "argmax", "amax"):
            self.rows.setdefault(name, []).append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_only_rows_that_ask_are_sorted() -> None:
    params = [
        SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.2),
    ]
    row_requests = np.repeat(np.arange(5), [5, 4, 3, 2, 1])
    with Shapes() as shapes:
        process_logits(torch.randn(15, 40), row_requests, params)
    assert shapes.rows == {"argmax": [5], "topk": [2], "sort": [3], "amax": [1]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_greedy_step_copies_no_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 7).to(dtype)
    assert process_logits(logits, np.array([0, 1, 1]), [SamplingParams(temperature=0)] * 2) is logits


RANDOM = CounterRandom([0, 0], torch.zeros(2, dtype=torch.int64))  # nothing is drawn


def verdicts(logits: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """What the greedy verifier makes of logits [4, vocab] in their dtype, and in float64."""
    draft = Draft.from_chains([[1, 1], []])
    found = (GreedyVerifier().verify(each, draft, RANDOM) for each in (logits, logits.double()))
    own, expected = (torch.cat([v.token_ids, v.num_accepted[:, None]], 1).tolist() for v in found)
    return own, expected


def check_greedy(dtype: torch.dtype) -> None:
    """Few different values, so that many are equal, and some that are not finite."""
    values = torch.tensor([0.0, 1.0, 2.0, 2.0, -torch.inf, torch.inf, torch.nan])
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        logits = values[torch.randint(0, 5 if seed % 2 else 7, (4, 6), generator=generator)].to(dtype)
        own, expected = verdicts(logits)
        assert own == expected
        naive = [naive_token(row) for row in logits.tolist()]
        assert own[1][0] == naive[3]
        plain = GreedyVerifier().verify(logits, Draft.from_chains([[]] * 4), RANDOM)
        assert plain.token_ids.tolist() == [[token] for token in naive]
        assert (plain.rows.tolist(), plain.num_accepted.tolist()) == ([[0], [1], [2], [3]], [0] * 4)


def naive_token(row: list[float]) -> int:
    is_sound = all(x < math.inf for x in row) and max(row) > -math.inf
    return row.index(max(row)) if is_sound else -1


@pytest.mark.parametrize("at_once", [argmax.AT_ONCE, 13, 1], ids=["all rows", "two rows", "one row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_verification_is_the_same_in_any_dtype(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argmax, "AT_ONCE", at_once)
    check_greedy(dtype)


@pytest.mark.parametrize(
    "fault",
    [
        lambda logits: logits.shape[1] - 1 - logits.float().flip(1).argmax(1),  # the last of equal ones
        lambda logits: logits.float().nan_to_num(posinf=0).argmax(1),  # what is not finite is overlooked
    ],
)
def test_the_comparison_notices(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def likeliest(logits: torch.Tensor) -> torch.Tensor:
        tokens = fault(logits)
        return tokens.masked_fill(~logits.gather(1, tokens[:, None])[:, 0].isfinite(), -1)

    monkeypatch.setattr(GreedyVerifier.__init__, "__defaults__", (likeliest,))
    with pytest.raises(AssertionError):
        check_greedy(torch.bfloat16)
