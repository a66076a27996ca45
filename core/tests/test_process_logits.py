"""Temperature, top-k and top-p compared with transformers, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec_core import SamplingParams
from specdec_core.sampling.process import process_logits


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
    row_requests = torch.tensor([i for i, (_, rows) in enumerate(requests) for _ in range(rows)])
    logits = 3 * torch.randn(len(row_requests), 97, generator=torch.Generator().manual_seed(seed))
    processed = process_logits(logits.clone(), row_requests, params)
    for row, request in enumerate(row_requests.tolist()):
        if all(p.temperature == 0 for p in params):
            assert processed[row].argmax() == logits[row].argmax()
        else:
            torch.testing.assert_close(processed[row].softmax(-1), reference(logits[row], params[request]))


def test_greedy_beside_sampled_is_a_point_mass() -> None:
    logits = torch.randn(2, 11)
    processed = process_logits(logits, torch.tensor([0, 1]), [SamplingParams(temperature=0), SamplingParams()])
    assert processed[0].isfinite().sum() == 1
    assert processed[0].argmax() == logits[0].argmax()


def test_all_tokens_stay_beside_a_request_with_top_p() -> None:
    """A request with top_p=1 keeps every token, although the sum of rounded probabilities may reach 1 before the last
    token."""
    logits = torch.randn(2, 151936, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[0]
    kept = process_logits(logits, torch.arange(2), [SamplingParams(), SamplingParams(top_p=0.9)]).isfinite()
    assert bool(kept[0].all())
    assert not bool(kept[1].all())


def test_equal_logits_are_cut_alike() -> None:
    """With top_k, all tokens tied at the k-th place are kept. With top_p, the likeliest token is kept even if its
    probability exceeds top_p."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    row = torch.tensor([0])
    assert process_logits(logits, row, [SamplingParams(top_k=2)]).isfinite().tolist() == [[True, True, True, False]]
    assert process_logits(logits, row, [SamplingParams(top_p=1e-6)]).isfinite().sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_stays_so(temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = torch.nan
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=1.0, top_k=2, top_p=0.5)]
    processed = process_logits(logits, torch.tensor([0, 1]), params)
    assert not processed[0].amax().isfinite()
    assert processed[1].amax().isfinite()
