"""Logprobs are the same whether the logits are on the CPU or on a (pretend) GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_core import SamplingParams
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.logprobs import TokenTexts, add_prompt_logprobs, output_logprobs, prompt_parts, rows_of
from specdec_core.engine.request import Request
from specdec_core.engine.scheduler import Schedule
from specdec_core.ops.download import Download
from specdec_core.sampling.logprobs import TokenLogprobs
from specdec_testing.pretend_cuda import CUDA, PretendCuda

NUMBERS = [2, None, 0]
"""The sampling parameter `logprobs` of three requests."""


def request_of(number: int | None) -> Request:
    params = SamplingParams(logprobs=number, prompt_logprobs=number)
    return Request(f"asks for {number}", np.array([3, 1, 4]), params, seed=0, max_total_tokens=9)


def logprobs_on(device: torch.device | str) -> dict[str, list[TokenLogprobs]]:
    verdict = Verdict(
        token_ids=torch.tensor([[5, 6, -1], [7, -1, -1], [1, 2, 3]]),
        rows=torch.tensor([[0, 2, 2], [3, 3, 3], [4, 5, 6]], dtype=torch.int32),
        num_accepted=torch.tensor([1, 0, 2], dtype=torch.int32),
    )
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(device)
    requests = [request_of(number) for number in NUMBERS]
    return output_logprobs(requests, verdict, verdict.token_ids.tolist(), logits, TokenTexts(None))


def prompt_logprobs_on(device: torch.device | str) -> list[TokenLogprobs | None] | None:
    request, schedule = request_of(2), Schedule()
    schedule.add(request, 3)
    (part,) = prompt_parts(schedule, _Batch())  # type: ignore[arg-type]
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).to(device)
    add_prompt_logprobs([part], logits[rows_of([part], torch.device(device))], TokenTexts(None))
    return request.prompt_logprobs


class _Batch:
    token_offsets = np.array([0])


def test_logprobs_of_output() -> None:
    expected = logprobs_on("cpu")
    assert [len(each) for each in expected.values()] == [2, 3]
    with PretendCuda():
        assert logprobs_on(CUDA) == expected


def test_logprobs_of_prompts() -> None:
    expected = prompt_logprobs_on("cpu")
    with PretendCuda():
        assert prompt_logprobs_on(CUDA) == expected


def test_the_pretend_device_refuses_what_a_real_one_refuses() -> None:
    on_host = torch.arange(3)
    with PretendCuda():
        there = torch.tensor([2, 0], device="cuda")
        assert (there.device, there.is_cuda, (there + 1).tolist()) == (CUDA, True, [3, 1])
        assert there[torch.tensor([1])].tolist() == [0]
        there[0] = torch.tensor(5)
        assert there.cpu().numpy().tolist() == [5, 0]
        for refused in (
            lambda: on_host[there],
            lambda: there + on_host[:2],
            lambda: torch.cat([there, on_host]),
            there.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                refused()


def test_a_queued_copy_has_its_values_once_the_host_has_waited() -> None:
    with PretendCuda() as pretend:
        value = torch.ones(2, device=CUDA)
        copy = Download(value)
        value.zero_()  # the copy was queued before
        assert (copy.get(), pretend.waits) == (None, [])
        assert value.cpu().tolist() == [0, 0]
        arrived = copy.get()
        assert arrived is not None
        assert (arrived.tolist(), len(pretend.waits)) == ([1, 1], 1)
