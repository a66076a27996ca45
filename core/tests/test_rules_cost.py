"""Sampling parameters that no request of a batch uses cost nothing: torch runs no additional operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core import LLM, SamplingParams
from specdec_core.engine import verification
from specdec_core.sampling.process import process_logits


class Counting(TorchDispatchMode):
    """Records the names of the torch operations that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any]) -> list[str]:
    with Counting() as counting:
        work()
    return counting.names


def bare(logits: torch.Tensor, row_requests: np.ndarray, params: Sequence[SamplingParams], *rest: Any) -> Any:
    """Replaces process_logits in tests. It applies only the temperature."""
    if params[0].is_greedy:
        return logits
    temperatures = np.array([p.temperature for p in params])[row_requests]
    return logits.float() / torch.from_numpy(temperatures).to(torch.float32).unsqueeze(1)


def forbid_the_last(logits: Any, token_ids: Any) -> Any:
    logits[token_ids[-1]] = -torch.inf
    return logits


ASKED = [
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_p": 0.9},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {5: 1.0}},
    {"bad_words": ["a", "self"]},
    {"allowed_token_ids": [5, 6, 7, 8]},
    {"min_tokens": 30, "stop_token_ids": [5]},
    {"logits_processors": [forbid_the_last]},
    {"logprobs": 1},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_sampling_is_temperature_alone(temperature: float) -> None:
    logits, rows, params = torch.randn(3, 50), np.array([0, 1, 1]), [SamplingParams(temperature=temperature)] * 2
    assert counted(lambda: process_logits(logits, rows, params)) == counted(lambda: bare(logits, rows, params))


@pytest.fixture(scope="module")
def llm(checkpoint: Any) -> LLM:
    return LLM(checkpoint, dtype="float32", max_model_len=128, num_kv_blocks=64)


def decode_step(llm: LLM, **asked: Any) -> list[str]:
    """Return the names of the torch operations in one decode step of two requests. One is sampled plainly, the other
    with the sampling parameters `asked`."""
    plain = {"temperature": 0.8, "max_tokens": 40, "seed": 1}
    each = [llm.engine.add_request([5, 6, 7, 8], SamplingParams(**plain, **wanted)) for wanted in ({}, asked)]
    for _ in range(3):
        llm.engine.step()
    names = counted(llm.engine.step)
    for request_id in each:
        llm.engine.cancel(request_id)
    return names


def test_a_plain_step_has_no_more_operations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of plain sampling runs no more operations than if only the temperature were applied, even after
    steps that used every sampling parameter."""
    before = decode_step(llm)
    for asked in ASKED:
        assert len(decode_step(llm, **asked)) > len(before), asked
    assert decode_step(llm, prompt_logprobs=1) == before  # once the prompt is done
    assert decode_step(llm) == before
    monkeypatch.setattr(verification, "process_logits", bare)
    monkeypatch.setattr(verification.ConstrainedRows, "of", lambda requests, draft: None)
    assert decode_step(llm) == before


def test_parameters_pay_for_themselves_alone(llm: LLM) -> None:
    """Two sampling parameters together add no more operations than the sum of what each adds alone."""
    plain, bias, penalty = (len(decode_step(llm, **asked)) for asked in ({}, ASKED[6], ASKED[3]))
    assert len(decode_step(llm, **ASKED[6], **ASKED[3])) <= bias + penalty - plain
