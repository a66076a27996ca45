"""Drafts that are stopped anywhere leave the cache as it should be: a draft that is the target is right every time, but
for what is spoilt on purpose."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from noisy_copy import noisy_copy

from specdec_core import LLM, Draft, DraftStop, SamplingParams, Stopping
from specdec_core.testing import tiny_target

VOCAB_SIZE = 48
SHAPES = {"chain": None, "tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]"}


class AnyStop(Stopping):
    """Stops at any depth, at times before there is a draft."""

    generator = torch.Generator().manual_seed(0)
    depths: list[int]  # of all drafts
    right: list[int]  # how many levels of each were left as they were

    def __init__(self, num_requests: int) -> None:
        self._depths, self._depth = torch.randint(0, 5, (num_requests,), generator=self.generator), 0

    @property
    def drafting(self) -> torch.Tensor:
        return self._depths.nonzero().squeeze(1)

    def goes_on(self, *nodes: torch.Tensor) -> torch.Tensor:
        self._depth += 1
        return self._depths > self._depth

    def keep(self, draft: Draft, *, in_place: bool) -> Draft:
        """Of a chain, a node of any depth becomes another token, if there is one so deep."""
        token_ids = draft.token_ids.clone()
        for b in range(draft.batch_size):
            depth = deepest(draft, b)
            right = int(torch.randint(0, 5, (1,), generator=self.generator)) if draft.is_chain else depth
            if right < depth:
                token_ids[draft.offsets[b] + right] += 1
            self.depths.append(depth)
            self.right.append(min(right, depth))
        return evolve(draft, token_ids=token_ids % VOCAB_SIZE)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_target_itself_drafts_is_accepted(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(AnyStop, "depths", [], raising=False)
    monkeypatch.setattr(AnyStop, "right", [], raising=False)
    monkeypatch.setattr(DraftStop, "begin", lambda self, batch: AnyStop(len(batch.requests)))
    target = tiny_target(tmp_path / "target")
    config = {
        "method": "draft_model",
        "model": str(noisy_copy(target, tmp_path / "draft", noise=0.0)),
        "num_speculative_tokens": 8,
        "speculative_token_tree": SHAPES[shape],
    }
    llm = LLM(str(target), dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, speculative_config=config)
    prompts = [{"prompt_token_ids": [3, *range(n)]} for n in (1, 5, 20)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    accepted = next(metric.value for metric in llm.get_metrics() if metric.name.endswith("num_accepted_tokens"))
    assert {0, 1, 2, 3} <= set(AnyStop.depths)
    assert accepted == sum(AnyStop.right)


def deepest(draft: Draft, request: int) -> int:
    depths: list[int] = []
    for parent in draft.tree(request).parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
