"""Thousands of random requests, with far too few KV blocks for them, generate the outputs that they have when run
alone. No state of finished requests is left in the engine.

SPECDEC_NIGHTLY=1 runs ten times as many requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_tree
import traffic
from attrs import evolve
from nightly import IS_NIGHTLY
from tiny_models import save_tiny_model
from traffic import Traffic, Wish

from specdec_core.engine.scheduler import Scheduler
from specdec_core.kv.block_pool import BlockPool
from specdec_core.kv.paged import PagedKVManager
from specdec_kv_prefix.manager import PrefixKVManager

SCALE = 10 if IS_NIGHTLY else 1
NUM_WISHES = 40 * (SCALE + 1)
Patch = pytest.MonkeyPatch
Outcome = tuple[list[int], str | None]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        "llama",
        tmp_path_factory.mktemp("small"),
        vocab_size=traffic.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.fixture(scope="module")
def wishes() -> list[Wish]:
    return traffic.random_wishes(NUM_WISHES, seed=5)


@pytest.fixture(scope="module")
def make_engine(small_model: Path, make_llm: Any) -> Callable[..., Any]:
    def make(method: str | None, **settings: Any) -> Any:
        options = {"num_speculative_tokens": traffic.NUM_SPECULATIVE_TOKENS}
        if method == "ngram":
            options |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        if method == "suffix":
            options |= {"suffix_decoding_use_tree": True, "suffix_decoding_max_cached_requests": 40}
        settings = {"max_model_len": traffic.MAX_MODEL_LEN, "block_size": traffic.BLOCK_SIZE, **settings}
        return make_llm(small_model, method, options=options, **settings).engine

    return make


@pytest.fixture(scope="module")
def alone(wishes: list[Wish], make_engine: Any) -> dict[tuple[Wish, int], Outcome]:
    """Return the outcome (token ids, finish reason) of each completion when its request runs alone, without
    speculation.

    Keys are (request, index of the completion).
    """
    engine = make_engine(None, max_num_seqs=1)
    outcomes: dict[tuple[Wish, int], Outcome] = {}
    for wish in wishes:
        for index in range(wish.params.n):
            ended: list[Any] = []
            params = evolve(wish.params.of_sample(index), num_speculative_tokens=None)
            engine.add_request(wish.prompt, params, lambda request, pieces, ended=ended: ended.append(request))
            while engine.has_unfinished:
                engine.step()
            outcomes[wish, index] = ended[-1].output_token_ids, ended[-1].finish_reason
    return outcomes


def wrong_ones(completions: list[traffic.Completion], alone: dict[tuple[Wish, int], Outcome]) -> list[Any]:
    """Return the completions that differ from those of the same requests run alone. A cancelled completion must be a
    prefix of the completion run alone."""
    wrong = []
    for each in completions:
        token_ids, reason = alone[each.wish, each.index]
        if each.finish_reason == "abort":
            is_right = each.token_ids == token_ids[: len(each.token_ids)]
            is_right &= each.cancel_at_step is not None or each.cancel_at_length is not None
        else:
            is_right = (each.token_ids, each.finish_reason) == (token_ids, reason)
        if not is_right:
            wrong.append((each, token_ids, reason))
    return wrong


def held_for_nobody(engine: Any) -> list[Any]:
    """Return the containers of an engine that still hold state of requests after all requests ended; empty if nothing
    leaked."""
    kept: list[Any] = [engine._requests, engine._scheduler.running, engine._scheduler.waiting, engine._news]
    kept += [engine._cancelled, engine.kv._pool._tables, engine.kv._num_final]
    kept += [vars(drafter.proposer.proposer).get("seen") for drafter in engine._speculation.drafters]
    return [each for each in kept if each]


@pytest.fixture
def send(wishes: list[Wish], alone: dict, make_engine: Any) -> Callable[..., Traffic]:
    """Return a function that sends random requests to an engine until all have ended, and returns the Traffic.

    The function takes the draft method (None: plain decoding) and the number of requests. The method random_tree
    drafts trees that contain the right continuation.
    """
    random_tree.TRUTH.update((wish.prompt, token_ids) for (wish, index), (token_ids, _) in alone.items() if index == 0)

    def run(method: str | None, num_requests: int) -> Traffic:
        engine = make_engine(
            method,
            num_kv_blocks=traffic.tenth_of_what_they_want(wishes),
            max_num_seqs=traffic.MAX_NUM_SEQS,
            max_num_batched_tokens=48,
        )
        sent = Traffic(engine, wishes, np.random.default_rng(num_requests))
        sent.run(num_requests)
        return sent

    return run


METHODS = [("random_tree", 500), ("ngram", 250), ("suffix", 350), (None, 150)]


@pytest.mark.parametrize(("method", "num_requests"), METHODS)
def test_each_is_as_it_would_be_alone(
    method: str | None, num_requests: int, send: Any, alone: dict, record_property: Any
) -> None:
    sent = send(method, num_requests * SCALE)
    figures = sent.figures
    record_property("figures", str(figures))
    print(f"{method}: {figures}")  # noqa: T201
    assert wrong_ones(sent.completions, alone) == []
    assert held_for_nobody(sent.engine) == []
    assert sent.engine.kv.num_free_blocks == sent.engine.kv._pool.num_blocks
    assert figures.num_preempted > num_requests * SCALE / 10
    assert figures.num_chunks > num_requests * SCALE / (10 if figures.num_cached else 5)
    assert figures.num_cancelled > num_requests * SCALE / 40
    if method is not None:
        assert figures.num_accepted > num_requests * SCALE / 4
        assert figures.num_draft_tokens - figures.num_accepted > num_requests * SCALE / 4


def a_preempted_request_keeps_its_count(patch: Patch) -> None:
    """A deliberate fault: a preempted request loses its KV blocks, but its number of computed tokens is not reset."""
    kept: dict[str, int] = {}
    preempt = Scheduler.preempt

    def remember(self: Scheduler, request: Any) -> None:
        kept[request.id] = request.num_computed
        preempt(self, request)

    def keep(admit: Any, self: Any, request_id: str, token_ids: np.ndarray, *more: Any) -> int:
        num_cached = admit(self, request_id, token_ids, *more)
        num_kept = min(kept.get(request_id, num_cached), max(0, len(token_ids) - 1))
        return num_kept - num_kept % traffic.BLOCK_SIZE  # what the engine checks

    patch.setattr(Scheduler, "preempt", remember)
    for manager in (PagedKVManager, PrefixKVManager):
        patch.setattr(manager, "admit", partialmethod(partial(keep, manager.admit)))


def block_tables_are_those_of_a_first_pass(patch: Patch) -> None:
    """A deliberate fault: a preempted request gets new KV blocks when it resumes, but keeps using its old block
    table."""
    first: dict[str, np.ndarray] = {}
    tables = BlockPool.tables

    def stale(self: BlockPool, request_ids: list[str]) -> np.ndarray:
        found = tables(self, request_ids).copy()
        for request_id, table in zip(request_ids, found, strict=True):
            known = first.setdefault(request_id, table[: len(self.blocks(request_id))].copy())
            table[: len(known)] = known
        return found

    patch.setattr(BlockPool, "tables", stale)


def a_cancelled_request_keeps_its_blocks(patch: Patch) -> None:
    remove = Scheduler.remove

    def keep(self: Scheduler, request: Any) -> None:
        with patch.context() as inner:
            if request.finish_reason == "abort":
                inner.setattr(self._kv, "release", lambda request_id: None)
            remove(self, request)

    patch.setattr(Scheduler, "remove", keep)


MUTATIONS = [
    a_preempted_request_keeps_its_count,
    block_tables_are_those_of_a_first_pass,
    a_cancelled_request_keeps_its_blocks,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_fault_is_noticed(mutation: Any, send: Any, alone: dict, monkeypatch: Patch) -> None:
    def faults() -> list[Any]:
        try:
            sent = send("ngram", 100)
        except AssertionError as error:  # of the traffic itself
            return [error]
        return wrong_ones(sent.completions, alone) + held_for_nobody(sent.engine)

    assert faults() == []
    mutation(monkeypatch)
    assert faults() != []
