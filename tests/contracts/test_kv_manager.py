"""Tests with a KV manager that asserts how the engine calls it, while requests draft, stop and are preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, field, frozen
from offered import Offered

from specdec_core import (
    ConfigError,
    KVContext,
    KVManagerSpec,
    PagedKVManager,
    PluginError,
    SamplingParams,
)
from specdec_core.api.arguments import dry_run
from specdec_core.engine import engine as engine_module
from specdec_core.engine.scheduler import Scheduler

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPTS = [[3, 4, 3, 4, 3, 4, 3, 4, i] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@frozen(kw_only=True)
class StrictConfig:
    waste: int = field(default=0)  # bytes that a block costs besides


class StrictKVManager(PagedKVManager):
    """A KV manager that raises AssertionError if the engine breaks the contract, for example by calls in the wrong
    order."""

    def __init__(self, config: StrictConfig, context: KVContext) -> None:
        super().__init__(context)
        self.config = config
        self.called: dict[str, str] = {}  # the last call for each request that is admitted
        self.num_tokens: dict[str, int] = {}
        self.calls: list[str] = []
        self.owners: list[tuple[str, int]] = []

    def add_group(self, layout: Any, owner: str = "target", lookahead: int = 0) -> int:
        self.owners.append((owner, lookahead))
        return super().add_group(layout, owner, lookahead)

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        assert request_id not in self.called, "it is admitted already"
        assert token_ids.dtype == np.int64
        assert not token_ids.flags.writeable
        self._called("admit", request_id)
        self.num_tokens[request_id] = 0
        return super().admit(request_id, token_ids, salt, groups)

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        assert self.called[request_id] in ("admit", "reserve", "advance")
        assert num_tokens > self.num_tokens[request_id]
        self._called("reserve", request_id)
        super().reserve(request_id, num_tokens, num_scratch)

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Any) -> None:
        for request_id in request_ids:
            assert self.called[request_id] == "reserve"
            self._called("compact", request_id)
        super().compact(request_ids, num_known, verdict)
        pairs = zip(request_ids, num_known, verdict.num_accepted.tolist(), strict=True)
        self.expected = {request_id: known + accepted for request_id, known, accepted in pairs}

    def advance(self, requests: Sequence[Any], counts: Sequence[int]) -> None:
        for request, count in zip(requests, counts, strict=True):
            assert self.called[request.id] == "compact"
            self._called("advance", request.id)
            assert count == self.expected[request.id]
            self.num_tokens[request.id] += count
            # All that is final is known, but for what was accepted behind a stop.
            assert self.num_tokens[request.id] < len(request.token_ids) + 5
        super().advance(requests, counts)

    def release(self, request_id: str) -> None:
        self.called.pop(request_id, None)
        self.calls.append("release")
        super().release(request_id)

    def _called(self, name: str, request_id: str) -> None:
        self.called[request_id] = name
        self.calls.append(name)


STRICT = KVManagerSpec(
    name="strict",
    config=StrictConfig,
    build=StrictKVManager,
    api=1,
    bytes_per_block=lambda config, layouts, size: config.waste + size * sum(each.bytes_per_token for each in layouts),
)


@pytest.fixture
def strict(make_llm: Callable[..., Any]) -> Callable[..., Any]:
    def make(**keywords: Any) -> Any:
        return make_llm(NGRAM, plugins=Offered(STRICT), kv_manager="strict", **keywords)

    return make


def test_it_is_called_as_its_contract_says(strict: Any, make_llm: Any, generate: Any) -> None:
    llm = strict()
    found = generate(llm, PROMPTS, GREEDY)
    assert found == generate(make_llm(), PROMPTS, GREEDY)
    manager = llm.engine.kv
    assert isinstance(manager, StrictKVManager)
    assert manager.owners == [("target", 0)]
    assert manager.calls.count("admit") == manager.calls.count("release") == len(PROMPTS)
    assert not manager.called
    assert llm.get_metrics()[2].value > 20, "drafts were accepted"


def test_preempted_requests_are_admitted_again(strict: Any, make_llm: Any, generate: Any) -> None:
    expected = generate(make_llm(), PROMPTS, GREEDY)
    llm = strict(num_kv_blocks=24, max_model_len=64)
    assert generate(llm, PROMPTS, GREEDY) == expected
    assert llm.engine.kv.calls.count("admit") > len(PROMPTS)


def test_a_stop_within_a_draft(strict: Any, generate: Any) -> None:
    """Output ends at a stop token inside an accepted draft, although `advance` also counts the draft tokens after the
    stop token."""
    llm = strict()
    (expected,) = generate(llm, PROMPTS[:1], GREEDY)
    stops = [SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token]) for token in set(expected)]
    for params in stops:
        (found,) = generate(llm, PROMPTS[:1], params)
        assert found == expected[: expected.index(params.stop_token_ids[0]) + 1]


def test_the_memory_plan_asks_it(target: Path) -> None:
    def num_bytes(waste: int) -> int:
        keywords = {"kv_manager": "strict", "kv_manager_config": {"waste": waste}, "max_model_len": 32}
        return dry_run(target, plugins=Offered(STRICT), skip_tokenizer_init=True, **keywords).memory.bytes_per_block

    assert num_bytes(1000) == num_bytes(0) + 1000


def test_a_request_that_waits_is_admitted_again_once_blocks_are_free(strict: Any, generate: Any) -> None:
    """The engine calls `admit` for a waiting request only once blocks are free, not in every step.

    A call may be slow: it may search a large or remote prefix cache for the request's tokens.
    """
    llm = strict(num_kv_blocks=16, max_model_len=64)
    generate(llm, PROMPTS, GREEDY)
    calls = llm.engine.kv.calls
    assert len(PROMPTS) < calls.count("admit") < calls.count("compact") / 2


@pytest.mark.parametrize("found", [9, 8, 3, -4])
def test_what_admit_returns_is_checked(found: int, strict: Any, generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses a cached prefix length that `admit` must not return.

    The prompt has 9 tokens. Wrong lengths are: the whole prompt, lengths that are no multiple of the block size 4,
    negative lengths, and any length but 0 if prompt logprobs are requested.
    """
    llm = strict()
    monkeypatch.setattr(PagedKVManager, "admit", lambda *arguments: found)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1 if found == 8 else None)
    with pytest.raises(PluginError, match=f"StrictKVManager.admit returned {found} for . tokens: allowed are whole"):
        generate(llm, PROMPTS[:1], params)


def test_a_manager_that_never_has_room_is_an_error(strict: Any, generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a KV manager never has enough free blocks, the engine raises an error instead of looping forever."""
    llm = strict()
    monkeypatch.setattr(StrictKVManager, "num_free_blocks", 1)
    with pytest.raises(PluginError, match="StrictKVManager has 1 free blocks while no request runs, and the next"):
        generate(llm, PROMPTS[:1], GREEDY)
    assert not llm.engine.has_unfinished


def test_its_options_are_the_users_fault(target: Path) -> None:
    @frozen(kw_only=True)
    class NeedyConfig:
        size: int

    needy = evolve(STRICT, name="needy", config=NeedyConfig)
    with pytest.raises(ConfigError, match=r"kv_manager_config of 'needy' is not complete: .*size"):
        dry_run(target, plugins=Offered(needy), skip_tokenizer_init=True, kv_manager="needy")


def test_a_block_has_a_size(target: Path) -> None:
    weightless = evolve(STRICT, name="weightless", bytes_per_block=lambda config, layouts, size: 0)
    with pytest.raises(PluginError, match=r"'weightless' could not say how large a block is: .*returned 0"):
        dry_run(target, plugins=Offered(weightless), skip_tokenizer_init=True, kv_manager="weightless")


def counts_without_accepted(patch: pytest.MonkeyPatch) -> None:
    advance = StrictKVManager.advance
    patch.setattr(
        StrictKVManager, "advance", lambda self, requests, counts: advance(self, requests, [min(1, n) for n in counts])
    )


def advance_before_compact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StrictKVManager, "compact", lambda self, ids, known, verdict: None)


def reserve_without_admission(patch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def careless(self: Any, room: int, schedule: Any) -> None:
        kv, self._kv = self._kv, _Admitting(self._kv)
        try:
            admit(self, room, schedule)
        finally:
            self._kv = kv

    patch.setattr(Scheduler, "_admit", careless)


class _Admitting:
    """Wraps a KV manager. Its `admit` returns 0 (no cached tokens) without calling the wrapped manager's `admit`."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv

    def admit(self, *arguments: Any) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)


def finished_before_it_advances(patch: pytest.MonkeyPatch) -> None:
    """A deliberate fault: the engine releases a finished request before it calls `advance`, so the request's blocks can
    no longer be published to the prefix cache."""
    emit = engine_module.Engine._emit

    def early(self: Any, *arguments: Any) -> Any:
        advance = self.kv.advance

        def late(requests: Any, counts: Any) -> None:
            for request in requests:
                if request.finish_reason is not None:
                    self.kv.release(request.id)
            advance(requests, counts)

        self.kv.advance = late
        try:
            return emit(self, *arguments)
        finally:
            del self.kv.advance

    patch.setattr(engine_module.Engine, "_emit", early)


@pytest.mark.parametrize(
    "fault",
    [counts_without_accepted, advance_before_compact, reserve_without_admission, finished_before_it_advances],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, strict: Any, generate: Any
) -> None:
    fault(monkeypatch)
    llm = strict()
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        generate(llm, PROMPTS, GREEDY)
