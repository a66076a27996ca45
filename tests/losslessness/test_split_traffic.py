"""Ranks agree after every step of random traffic: on the commands that they had, on each request's block table and
tokens, and on the free blocks. Requests are cancelled and preempted, and the budget of a step decides what is drafted.

SPECDEC_NIGHTLY=1 runs 10,000 steps of each kind.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_tree
import traffic
from nightly import IS_NIGHTLY
from tiny_models import save_tiny_model
from traffic import Traffic

from specdec_core import DeviceError
from specdec_core.ranks.driver import Ranks

pytestmark = pytest.mark.usefixtures("lasting")

NUM_STEPS = 10_000 if IS_NIGHTLY else 150
NUM_BLOCKS = 40  # four of the longest requests
KINDS = [
    ("random_tree", "paged", {"adaptive_draft_length": False}, 2),
    ("suffix", "prefix", {"suffix_decoding_use_tree": True, "adaptive_draft_length": True}, 2),
    ("ngram", "prefix", {"adaptive_draft_length": True, "prompt_lookup_min": 1, "prompt_lookup_max": 3}, 4),
]


class ComparedTraffic(Traffic):
    """Compares the ranks after each step."""

    def _step(self) -> None:
        super()._step()
        running = self.engine._scheduler.running
        first, *others = self.engine.kv.digests(running, [request.num_computed for request in running])
        assert all(other == first for other in others), (first, others)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one key head, which is repeated on each rank."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1}
    return save_tiny_model("llama", tmp_path_factory.mktemp("small"), vocab_size=traffic.VOCAB_SIZE, **sizes)


def sent(model: Path, make_llm: Any, kind: tuple[str, str, dict[str, Any], int], num_steps: int) -> Traffic:
    method, kv_manager, options, size = kind
    wishes = traffic.random_wishes(40, seed=5)
    random_tree.TRUTH.update((wish.prompt, [1, 2, 3] * 20) for wish in wishes)
    llm = make_llm(
        model,
        method,
        options={"num_speculative_tokens": traffic.NUM_SPECULATIVE_TOKENS, **options},
        tensor_parallel_size=size,
        kv_manager=kv_manager,
        max_model_len=traffic.MAX_MODEL_LEN,
        block_size=traffic.BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_batched_tokens=48,
    )
    try:
        found = ComparedTraffic(llm.engine, wishes, np.random.default_rng(num_steps))
        while found.figures.num_steps < num_steps:
            found.run(found.figures.num_requests + 20)
        return found
    finally:
        llm.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}, {kind[3]} ranks")
def test_ranks_agree_after_every_step(kind, model, make_llm):
    figures = sent(model, make_llm, kind, NUM_STEPS).figures
    assert figures.num_steps >= NUM_STEPS
    assert figures.num_preempted > 0
    assert figures.num_cancelled > 0
    assert figures.num_draft_tokens > 0


def test_a_kv_manager_that_finds_other_tokens_on_a_rank_is_named(model, make_llm, monkeypatch):
    later = Ranks.later

    def wrong(self: Ranks, name: str, *args: Any) -> None:
        later(self, name, *((*args[:-1], args[-1] + traffic.BLOCK_SIZE) if name == "admit" else args))

    monkeypatch.setattr(Ranks, "later", wrong)
    with pytest.raises(DeviceError, match="rank 1 of 2 raised RuntimeError: the KV manager found 0 cached tokens"):
        sent(model, make_llm, KINDS[0], NUM_STEPS)


@pytest.mark.parametrize("lost", ["release", "reserve", "advance"])
def test_commands_that_are_lost_are_noticed(lost, model, make_llm, monkeypatch):
    later, is_lost = Ranks.later, cycle([False] * 9 + [True])

    def losing(self: Ranks, name: str, *args: Any) -> None:
        if name != lost or not next(is_lost):
            later(self, name, *args)

    monkeypatch.setattr(Ranks, "later", losing)
    with pytest.raises((AssertionError, DeviceError)):
        sent(model, make_llm, KINDS[0], NUM_STEPS)
