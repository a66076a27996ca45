"""Drafts under a budget (adaptive_draft_length): outputs stay the same, and drafts that never help end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core import LLM, SamplingParams
from specdec_core.budget.budget import Budget
from specdec_core.budget.retries import Retries

PROMPTS = ["import os\n\nclass Tree:\n    def __init__(self", "The quick brown fox", "x = [1, 2, 3]\n" * 4]


def noisy_tiny(folder: Path, noise: float) -> str:
    """Save the embedded model with noise on its weights, and return its folder.

    noise: the standard deviation of the noise, relative to that of each weight tensor.
    """
    from specdec_model_tiny import model_path

    source, generator = Path(model_path()), torch.Generator().manual_seed(0)
    for file in sorted(source.glob("model*.safetensors")):
        weights = load_file(file)
        for weight in weights.values():
            if weight.dim() == 2:
                added = noise * weight.float().std() * torch.randn(weight.shape, generator=generator)
                weight += added.to(weight.dtype)
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def run(config: dict[str, Any] | None, temperature: float, max_tokens: int = 40, **options: Any) -> tuple[Any, int]:
    """Return the outputs' token ids and the number of draft tokens."""
    with LLM("tiny", dtype="float32", speculative_config=config, **options) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [list(output.outputs[0].token_ids) for output in outputs], counts["vllm:spec_decode_num_draft_tokens"]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def plain(request: pytest.FixtureRequest) -> tuple[float, Any]:
    return request.param, run(None, request.param)[0]


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {},
    "draft_model": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 0, 0)]"},
    "eagle": {"eagle_topk": 1},
    "eagle3": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_plain_decoding(method: str, plain: tuple[float, Any], monkeypatch: Any) -> None:
    """A budget that is as unsteady as can be: it goes by times that are drawn at random."""
    generator = torch.Generator().manual_seed(1)
    numbers = Budget._numbers

    def unsteady(self: Budget, *of: Any) -> list[int]:
        seconds = torch.rand(len(self._curve.seconds(1)), generator=generator).sort().values.numpy() + 1.0
        self._curve.seconds = lambda num_requests: seconds  # type: ignore[method-assign]
        self._held = None
        return numbers(self, *of)

    monkeypatch.setattr(Budget, "_numbers", unsteady)
    temperature, expected = plain
    config = {"method": method, "adaptive_draft_length": True, **METHODS[method]}
    found, num_draft_tokens = run(config, temperature, num_kv_blocks=12, block_size=16, max_model_len=160)
    assert found == expected
    assert num_draft_tokens


def test_drafts_that_are_noise_end(tmp_path: Path) -> None:
    draft = {"method": "draft_model", "model": noisy_tiny(tmp_path, 5.0), "num_speculative_tokens": 6}
    expected, fixed = run(draft, 0.0, 60)
    found, num_draft_tokens = run({**draft, "adaptive_draft_length": True}, 0.0, 60)
    assert found == expected
    assert num_draft_tokens < 0.3 * fixed


@pytest.mark.parametrize(
    ("keys", "is_adaptive"),
    [
        ({}, True),
        ({"num_speculative_tokens": 3}, False),
        ({"num_speculative_tokens": 3, "adaptive_draft_length": True}, True),
        ({"adaptive_draft_length": False}, False),
    ],
)
def test_a_number_that_is_given_is_kept(keys: dict[str, Any], is_adaptive: bool) -> None:
    with LLM("tiny", dtype="float32", speculative_config={"method": "ngram", **keys}) as llm:
        assert llm.speculative_config.adaptive_draft_length is is_adaptive
        assert (llm.engine._speculation.drafters[0].budget is not None) == is_adaptive


def test_small_steps_can_be_measured() -> None:
    """The engine measures what steps cost with requests that fit into one."""
    config = {"method": "suffix", "adaptive_draft_length": True}
    found, _ = run(config, 0.0, 8, max_num_batched_tokens=3, max_num_seqs=2)
    assert found == run(None, 0.0, 8)[0]


class Recorded:
    """Runs EAGLE-3 step by step, and records its drafts: {(request id, number of tokens): draft tokens}."""

    def __init__(self) -> None:
        config = {"method": "eagle3", "eagle_topk": 1, "num_speculative_tokens": 4, "adaptive_draft_length": True}
        self.llm = LLM("tiny", dtype="float32", speculative_config=config, disable_log_stats=True)
        self.drafts: dict[tuple[str, int], list[int]] = {}
        self.num_calls, self.num_idle, self.drafting = 0, 0, True
        (drafter,) = self.llm.engine._speculation.drafters
        budget, proposer, observer = drafter.budget, drafter.proposer.proposer, drafter.observer
        assert budget is not None
        self.curve, choices = budget._curve, lambda limits: limits if self.drafting else [0] * len(limits)
        budget._choose = lambda rows, limits, so_far: choices(limits)  # type: ignore[method-assign]
        self.curve.add = lambda *of, **named: None  # type: ignore[method-assign]
        self.set_costs(1.0)
        budget.retries._debt.add(1e9)
        propose, observe, put_off = proposer.propose, proposer.observe, observer.put_off_plain

        def record(batch: Any) -> Any:
            self.num_calls += 1
            draft = propose(batch)
            for request, tree in zip(batch.requests, map(draft.tree, range(len(batch.requests))), strict=True):
                self.drafts[request.id, request.num_tokens] = list(tree.token_ids)
            return draft

        def count_call(observation: Any) -> None:
            self.num_calls += 1
            observe(observation)

        def count_idle(requests: Any, starts: Any, passes: Any) -> None:
            self.num_idle += len(passes)
            put_off(requests, starts, passes)

        proposer.propose, proposer.observe, observer.put_off_plain = record, count_call, count_idle
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(seed=seed, max_tokens=300, ignore_eos=True)
            self.llm.engine.add_request(self.llm.get_tokenizer().encode(prompt), params)

    def set_costs(self, seconds: float) -> None:
        of_all = torch.full((len(self.curve.seconds(1)),), seconds).numpy()
        self.curve.seconds = lambda num_requests: of_all  # type: ignore[method-assign]
        self.curve.num_corrections += 1

    def resume(self) -> None:
        self.drafting = True
        self.set_costs(2.0)  # other costs: it decides anew


def test_drafts_after_a_long_pause_are_those_of_a_head_that_had_none() -> None:
    paused, always = Recorded(), Recorded()
    paused.drafting = False
    for _ in range(200):
        paused.llm.engine.step()
    assert paused.num_calls <= 2, "the prompts"
    assert paused.num_idle > 180
    paused.resume()
    for each in (paused, always):
        while each.llm.engine.has_unfinished:
            each.llm.engine.step()
    common = paused.drafts.keys() & always.drafts.keys()
    pairs = [(paused.drafts[at], always.drafts[at]) for at in common]
    assert len(pairs) > 20
    for ours, theirs in pairs:  # how deep they are depends on the other requests
        assert all(a == b for a, b in zip(ours, theirs, strict=False))
    assert sum(min(map(len, pair)) for pair in pairs) > 2 * len(pairs)
    assert min(length for _, length in paused.drafts) > 200


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_that_are_off_cost_no_cached_prefix(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose cached tokens its draft lacks does not draft. Sooner or later one computes them all, to try
    drafting again."""
    config = {"method": method, "adaptive_draft_length": True}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("tiny", dtype="float32", kv_manager="prefix", speculative_config=config) as llm:

        def drafts_of(number: int) -> tuple[Any, int]:
            monkeypatch.setattr(Budget, "_choose", lambda self, rows, limits, so_far: [number] * len(limits))
            (output,) = llm.generate(PROMPTS[2], params, use_tqdm=False)
            counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            return output, counts["vllm:spec_decode_num_draft_tokens"]

        with monkeypatch.context() as patch:
            patch.setattr(Retries, "is_due", False)
            first, num_before = drafts_of(0)
            second, num_then = drafts_of(0)
            third, num_after = drafts_of(3)  # it would, but lacks the first tokens
        assert (first.num_cached_tokens, num_before, num_then, num_after) == (0, 0, 0, 0)
        assert second.num_cached_tokens == third.num_cached_tokens > 0
        found = [drafts_of(3) for _ in range(40)]
    assert found[-1][1] > 0, "it was never tried again"
    texts = {tuple(output.outputs[0].token_ids) for output in (first, second, third, *(each for each, _ in found))}
    assert len(texts) == 1
