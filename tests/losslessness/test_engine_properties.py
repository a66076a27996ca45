"""A thousand requests that come, go, are cancelled and preempted: nothing leaks and nothing changes."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import random_tree
import reference
from attrs import define

NUM_REQUESTS = 1000


@define
class Expected:
    prompt: list[int]
    params: Any
    cancel_after: int | None  # engine steps, from its submission on


def random_requests(seed: int) -> list[Expected]:
    from specdec_core import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = reference.prompts(200, rng.integers(1, 40, size=NUM_REQUESTS).tolist(), seed)
    return [
        Expected(
            prompt,
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.0, 0.7, 1.0])),
                max_tokens=int(rng.integers(1, 16)),
                seed=i,
                ignore_eos=True,
                num_speculative_tokens=[None, None, 0, 1, 4, 9][int(rng.integers(6))],
            ),
            int(rng.integers(0, 8)) if rng.random() < 0.15 else None,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def requests() -> list[Expected]:
    return random_requests(seed=11)


@pytest.fixture(scope="module")
def undisturbed(requests: list[Expected], tiny_models: dict, make_llm: Any, generate: Any) -> list[list[int]]:
    """All outputs, with blocks in plenty, without speculation and without cancellations."""
    llm = make_llm(tiny_models["llama"], None, num_kv_blocks=1024, max_num_seqs=64)
    params = [attrs.evolve(r.params, num_speculative_tokens=None) for r in requests]
    outputs = generate(llm, [r.prompt for r in requests], params)
    return [output.token_ids for output in outputs]


class Collector:
    """Listens to an engine; keeps the finished requests' outputs."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def __call__(self, request: Any, pieces: Any) -> None:
        if request.finish_reason is not None:
            self.outputs[request.id] = request.token_ids[request.num_prompt_tokens :].tolist()
            self.reasons[request.id] = request.finish_reason


@pytest.mark.parametrize("method", ["random_tree", None], ids=str)
def test_a_thousand_requests(
    method: str | None, requests: list[Expected], undisturbed: list, tiny_models: dict, make_llm: Any
) -> None:
    random_tree.TRUTH.update(zip((tuple(r.prompt) for r in requests), undisturbed, strict=True))
    num_blocks = 40  # for 16 requests of up to 54 tokens and their drafts, of which a block holds 4
    llm = make_llm(tiny_models["llama"], method, num_kv_blocks=num_blocks, block_size=4, max_num_batched_tokens=64)
    engine, rng, collector = llm.engine, np.random.default_rng(3), Collector()
    all_free = engine.kv.num_free_blocks
    waiting, index_of, to_cancel = list(enumerate(requests)), {}, {}
    num_preempted = num_steps = num_accepted = num_drafted = 0
    while waiting or engine.has_unfinished:
        for _ in range(min(int(rng.integers(0, 6)), len(waiting))):
            i, request = waiting.pop(0)
            params = request.params if method else attrs.evolve(request.params, num_speculative_tokens=None)
            request_id = engine.add_request(request.prompt, params, collector)
            index_of[request_id] = i
            if request.cancel_after is not None:
                to_cancel[request_id] = num_steps + request.cancel_after
        for request_id in [key for key, step in to_cancel.items() if step <= num_steps]:
            engine.cancel(request_id)
            del to_cancel[request_id]
        if engine.has_unfinished:
            report = engine.step()
            num_preempted += report.num_preempted
            num_accepted += report.num_accepted
            num_drafted += report.num_draft_tokens
        num_steps += 1
        if num_steps % 16 == 0:
            engine.kv.check_integrity()
        assert num_steps < 20_000, "the engine makes no progress"

    engine.kv.check_integrity()
    assert engine.kv.num_free_blocks == all_free
    assert num_preempted > 10
    if method is not None:
        assert num_accepted > 500
        assert num_drafted - num_accepted > 500
    cancelled = 0
    for request_id, i in index_of.items():
        if requests[i].cancel_after is not None and collector.reasons[request_id] == "abort":
            cancelled += 1
            output = collector.outputs[request_id]
            assert output == undisturbed[i][: len(output)]
            continue
        assert collector.reasons[request_id] == "length"
        assert collector.outputs[request_id] == undisturbed[i], f"request {i}: {requests[i]}"
    assert cancelled > 30
