"""A lossy verifier decides only for sampled requests that have drafts. Outputs have `lossless=False` if the
request is sampled and may draft, else True."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_core import LLM, Draft, Plugins, SamplingParams, Verdict, VerifierSpec

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 5, 6, i]} for i in range(7, 13)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=1)
WITHOUT_DRAFTS = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=2, num_speculative_tokens=0)


class Lenient:
    """A lossy verifier that accepts every draft token of a chain, and then emits token 0."""

    def verify(self, logits: torch.Tensor, draft: Draft, random: Any) -> Verdict:
        token_ids = torch.full((draft.batch_size, draft.max_depth + 1), -1)
        rows = torch.zeros(token_ids.shape, dtype=torch.int32)
        for request, (begin, end) in enumerate(zip(draft.offsets, draft.offsets[1:], strict=False)):
            token_ids[request, : end - begin] = draft.token_ids[begin:end]
            token_ids[request, end - begin] = 0
            first = begin + request
            rows[request] = torch.arange(first, first + draft.max_depth + 1).clamp(max=first + end - begin)
        return Verdict(token_ids, rows, torch.tensor(draft.num_nodes_per_request, dtype=torch.int32))


class PluginsWithLenient:
    def __init__(self) -> None:
        self._installed = Plugins.load()

    def verifier(self, name: str) -> VerifierSpec:
        is_theirs = name == "lenient"
        return VerifierSpec(name, Lenient, 1, lossless=False) if is_theirs else self._installed.verifier(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._installed, name)


def make_llm(verifier: str | None) -> LLM:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return LLM(
        "tiny",
        dtype="float32",
        max_model_len=64,
        plugins=PluginsWithLenient(),  # type: ignore[arg-type]
        speculative_config=verifier and {**ngram, "verifier": verifier},
    )


@pytest.mark.parametrize("verifier", ["lenient", "typical"])
def test_it_decides_above_temperature_0_only(verifier: str) -> None:
    params = [GREEDY, SAMPLED, WITHOUT_DRAFTS] * 2
    plain = make_llm(None).generate(PROMPTS, params, use_tqdm=False)
    assert all(output.lossless for output in plain)
    llm = make_llm(verifier)
    alone = llm.generate(PROMPTS[::3], params[::3], use_tqdm=False)
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.lossless for output in together] == [True, False, True] * 2
    for index in (0, 2, 3, 5):
        assert together[index].outputs[0].token_ids == plain[index].outputs[0].token_ids
    for output, expected in zip(alone, plain[::3], strict=True):
        assert (output.outputs[0].token_ids, output.lossless) == (expected.outputs[0].token_ids, True)
    steps = {each.name: each.value for each in llm.get_metrics() if each.name.endswith(f"_verified_by_{verifier}")}
    assert list(steps.values()) > [0]
    if verifier == "lenient":
        assert together[1].outputs[0].token_ids != plain[1].outputs[0].token_ids
    streamed = list(llm.stream(PROMPTS[:2], params[:2]))
    assert {(output.prompt_index, output.lossless) for output in streamed} == {(0, True), (1, False)}
