"""Tests that a draft which stops early equals the upper levels of the full draft, wherever the drafts of other requests
stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from tiny_heads import write_eagle, write_eagle3
from tiny_weights import Target

from specdec_core import LLM, Draft, ProposerBatch, SamplingParams
from specdec_proposer_eagle.proposer import EagleProposer
from specdec_testing import tiny_target

NUM_CANDIDATES = 14  # expanded nodes of the dynamic tree
SIZES = Target(hidden_size=32, vocab_size=48, num_hidden_layers=6)


class AnyStop:
    """A level budget that stops each request's draft at a random depth."""

    generator = torch.Generator().manual_seed(0)

    def __init__(self, num_requests: int) -> None:
        self.depths, self._depth = torch.randint(1, 5, (num_requests,), generator=self.generator), 0

    def goes_on(self, *nodes: np.ndarray) -> np.ndarray:
        self._depth += 1
        return (self.depths > self._depth).numpy()


@pytest.mark.parametrize("write", [write_eagle, write_eagle3])
@pytest.mark.parametrize(
    "options",
    [
        {"eagle_topk": 1, "num_speculative_tokens": 5},
        {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 0)]"},
        {"eagle_topk": 2, "eagle_depth": 3, "num_speculative_tokens": NUM_CANDIDATES},
    ],
    ids=["chain", "tree", "dynamic"],
)
def test_a_stopped_draft_is_the_upper_part(write, options, tmp_path, monkeypatch):
    propose, compared = EagleProposer.propose, []

    def propose_twice(self: EagleProposer, batch: ProposerBatch) -> Draft:
        whole = propose(self, batch)
        stopping = AnyStop(len(batch.requests))
        stopped = propose(self, evolve(batch, levels=stopping))
        for b, (depth, budget) in enumerate(zip(stopping.depths.tolist(), batch.max_draft_tokens, strict=True)):
            found, upper = paths(stopped, b), [path for path in paths(whole, b) if len(path) <= depth]
            compared.append(depth)
            # In a dynamic tree that was cut, levels that are missing below leave more nodes for those above.
            assert found == upper or (budget < NUM_CANDIDATES and set(upper) < set(found))
        return stopped

    monkeypatch.setattr(EagleProposer, "propose", propose_twice)
    target = tiny_target(tmp_path / "target", num_hidden_layers=6)
    config = {"model": str(write(tmp_path / "head", SIZES).folder), "adaptive_draft_length": False, **options}
    llm = LLM(str(target), dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, speculative_config=config)
    prompts = [{"prompt_token_ids": [3, *range(n)]} for n in (1, 5, 20)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert set(compared) == {1, 2, 3, 4}


def paths(draft: Draft, request: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(*draft.tree(request), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found
