"""The top tokens that a proposer observes equal those of transformers.

Top tokens are observed after each root (the request's last token) and after each draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger import LEDGER
from offered import Offered

from specdec_core import SamplingParams
from specdec_core.engine import observation as module

PROMPTS = [[3, 4, 3, 4, 5, 5, 5, i] for i in range(3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=12, repetition_penalty=1.5),
    SamplingParams(temperature=0, max_tokens=12, num_speculative_tokens=1),
]


@pytest.fixture(scope="module")
def reference(target: Path) -> Callable[[list[int]], torch.Tensor]:
    """Return a function that takes token ids and returns transformers' logprobs [vocab] for the next token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    @torch.inference_mode()
    def run(token_ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)

    return run


def check(make_llm: Any, reference: Any, chunk: int) -> int:
    """Generate with a proposer that observes top tokens, and compare these with the top tokens of transformers.

    chunk: the engine's max_num_batched_tokens.
    Returns the number of draft tokens compared.
    """
    config = {"method": "ledger", "num_speculative_tokens": 2, "top_tokens": 3}
    llm = make_llm(config, plugins=Offered(LEDGER), max_num_batched_tokens=chunk)
    ledger = llm.engine._speculation.drafters[0].proposer.proposer
    seen: list[tuple[Any, list[list[int]]]] = []
    observe = ledger.observe

    def keeping(observation: Any) -> None:
        seen.append((observation.top_tokens, [request.token_ids.tolist() for request in observation.requests]))
        observe(observation)

    ledger.observe = keeping
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    num_nodes = 0
    for top, texts in seen:
        paths: list[list[int]] = []
        for request, position, token, parent in zip(
            top.requests.tolist(), top.positions.tolist(), top.token_ids.tolist(), top.parents.tolist(), strict=True
        ):
            if parent == -1:
                paths.append(texts[request][: position + 1])
                assert paths[-1][-1] == token
            else:
                paths.append([*paths[parent], token])
                assert len(paths[-1]) == position + 1
                num_nodes += 1
        for row, path in enumerate(paths):
            expected = reference(path).topk(3)
            assert top.ids[row].tolist() == expected.indices.tolist()
            assert torch.allclose(top.logprobs[row], expected.values, atol=1e-4)
    return num_nodes


@pytest.mark.parametrize("chunk", [6, 512])
def test_they_are_those_of_the_raw_logits(make_llm: Any, reference: Any, chunk: int) -> None:
    assert check(make_llm, reference, chunk) > 10


def test_without_the_plan_there_are_none(make_llm: Any) -> None:
    llm = make_llm({"method": "ledger", "num_speculative_tokens": 2}, plugins=Offered(LEDGER))
    llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0], use_tqdm=False)
    assert {each.top_tokens for each in llm.engine._speculation.drafters[0].proposer.proposer.observations} == {None}


def of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    top_tokens = module._top_tokens

    def shifted(computed: Any, *arguments: Any) -> Any:
        import attrs

        return top_tokens(attrs.evolve(computed, logits=computed.logits.roll(-1, dims=0)), *arguments)

    patch.setattr(module, "_top_tokens", shifted)


def after_temperature(patch: pytest.MonkeyPatch) -> None:
    top_tokens = module._top_tokens

    def warm(computed: Any, *arguments: Any) -> Any:
        import attrs

        return top_tokens(attrs.evolve(computed, logits=computed.logits / 0.7), *arguments)

    patch.setattr(module, "_top_tokens", warm)


def parents_over_all_requests(patch: pytest.MonkeyPatch) -> None:
    top_tokens = module._top_tokens

    def rooted(computed: Any, draft: Any, *arguments: Any) -> Any:
        import attrs

        found = top_tokens(computed, draft, *arguments)
        return attrs.evolve(found, parents=found.parents.clamp(max=0))

    patch.setattr(module, "_top_tokens", rooted)


@pytest.mark.parametrize(
    "fault", [of_the_next_row, after_temperature, parents_over_all_requests], ids=lambda fault: fault.__name__
)
def test_faults_are_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch, make_llm: Any, reference: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(make_llm, reference, 512)
