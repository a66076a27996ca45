"""Tests that drafts which stop early, at any depth, leave the draft model's KV cache correct.

The draft model is a copy of the target, so every draft token is accepted except those that the test makes wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from noisy_copy import noisy_copy

from specdec_core import LLM, Draft, ProposerBatch, SamplingParams
from specdec_core.drafting.chain import HostChain
from specdec_core.engine.drafter import Drafter
from specdec_proposer_draft.proposer import DraftModelProposer
from specdec_testing import tiny_target

VOCAB_SIZE = 48
SHAPES = {"chain": None, "tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]"}


class AnyStop:
    """A level budget that stops each request's draft at a random depth. If is_spoilt, the test makes all draft tokens
    of request i wrong except the first num_right[i]."""

    def __init__(self, num_requests: int, generator: torch.Generator, is_spoilt: bool) -> None:
        self._depths = torch.randint(1, 5, (num_requests,), generator=generator)
        self.num_right = torch.randint(0, 5, (num_requests,), generator=generator) if is_spoilt else self._depths + 1
        self.num_grown = 0
        self.depths: list[int] = []  # of all drafts of a step

    def goes_on(self, *nodes: np.ndarray) -> np.ndarray:
        self.num_grown += 1
        return (self._depths > self.num_grown).numpy()


def accepted_and_right(
    patch: pytest.MonkeyPatch, folder: Any, shape: str, max_tokens: int = 100
) -> tuple[int, int, set[int]]:
    """Generate with a draft model that is a copy of the target, and with drafts that stop at random depths. A request
    does not draft in every step.

    shape: a key of SHAPES.

    Returns the number of accepted draft tokens, the number of correct draft tokens, and the set of the drafts' depths.
    """
    stops: list[AnyStop] = []
    generator = torch.Generator().manual_seed(0)
    next_tokens = HostChain._next_tokens
    propose = DraftModelProposer.propose

    def propose_part(self: DraftModelProposer, batch: ProposerBatch) -> Draft:
        stops.append(AnyStop(len(batch.requests), generator, is_spoilt=shape == "chain"))
        draft = propose(self, evolve(batch, levels=stops[-1]))
        stops[-1].depths = [deepest(draft, b) for b in range(draft.batch_size)]
        return draft

    def wrong_tokens(self: HostChain, logits: torch.Tensor) -> tuple[Any, ...]:
        """Replace tokens of a level by wrong ones. The draft model has not forwarded them yet, so its KV cache will
        hold the wrong tokens."""
        token_ids, *others = next_tokens(self, logits)
        is_wrong = stops[-1].num_right.numpy()[self._requests] <= stops[-1].num_grown
        return (np.where(is_wrong, (token_ids + 1) % VOCAB_SIZE, token_ids), *others)

    limit = Drafter._limit

    def limit_or_skip(self: Drafter, *of: Any) -> int:
        return int(torch.randint(0, 5, (), generator=generator) and limit(self, *of))

    patch.setattr(Drafter, "_limit", limit_or_skip)
    patch.setattr(DraftModelProposer, "propose", propose_part)
    patch.setattr(HostChain, "_next_tokens", wrong_tokens)
    target = tiny_target(folder / "target")
    config = {
        "method": "draft_model",
        "model": str(noisy_copy(target, folder / "draft", noise=0.0)),
        "num_speculative_tokens": 8,
        "speculative_token_tree": SHAPES[shape],
    }
    llm = LLM(str(target), dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, speculative_config=config)
    prompts = [{"prompt_token_ids": [3, *range(n)]} for n in (1, 5, 20)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    accepted = next(metric.value for metric in llm.get_metrics() if metric.name.endswith("num_accepted_tokens"))
    pairs = [pair for stop in stops for pair in zip(stop.num_right.tolist(), stop.depths, strict=True)]
    return accepted, sum(map(min, pairs)), {depth for _, depth in pairs}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_target_itself_drafts_is_accepted(shape, tmp_path, monkeypatch):
    accepted, right, depths = accepted_and_right(monkeypatch, tmp_path, shape)
    assert {1, 2, 3} <= depths
    assert accepted == right > 100


def test_counting_tokens_of_skipped_steps_as_accepted_nodes_drafts_worse(tmp_path, monkeypatch):
    catch_up = DraftModelProposer._catch_up

    def inferred(self: DraftModelProposer, requests: list[Any]) -> torch.Tensor:
        for request in requests:
            stored = self._stored[request.id]
            stored.settle(len(request.token_ids) - stored.num_tokens - 1)
        return catch_up(self, requests)

    monkeypatch.setattr(DraftModelProposer, "observe", lambda self, observation: None)
    monkeypatch.setattr(DraftModelProposer, "_catch_up", inferred)
    accepted, right, _ = accepted_and_right(monkeypatch, tmp_path, "chain")
    assert accepted < right


def deepest(draft: Draft, request: int) -> int:
    depths: list[int] = []
    for parent in draft.tree(request).parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
