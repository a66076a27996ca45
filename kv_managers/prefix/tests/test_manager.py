"""Tests of the KV manager `prefix` with slots that store hashes instead of keys and values. When a fault is patched
into the manager, these tests must fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from specdec_core import BlockPool, KVContext
from specdec_kv_prefix import PrefixConfig
from specdec_kv_prefix.manager import PrefixKVManager, Text
from specdec_kv_prefix.pool import SharedBlocks
from specdec_testing.kv_driver import HEAD, LAZY, Driver

BASE, SHARED = sys.modules[BlockPool.__module__], sys.modules[SharedBlocks.__module__]
IDS = ("a", "b", "c", "d")
GROUPS = ((), (HEAD,), (LAZY,), (HEAD, LAZY))


def make(num_blocks: int, block_size: int, max_cached_blocks: int | None = None) -> PrefixKVManager:
    config = PrefixConfig(max_cached_blocks=max_cached_blocks)
    return PrefixKVManager(config, KVContext(num_blocks, block_size, torch.device("cpu")))


operations = st.lists(
    st.tuples(
        st.sampled_from(["admit", "step", "step", "step", "catch_up", "release", "stop"]),
        st.sampled_from(IDS),
        st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=60,
)


def run(driver: Driver, steps: list[tuple[str, str, int]]) -> int:
    """Apply random operations to requests, and check the contents of all slots after each operation. Prompts have only
    two different token ids, so that prefixes repeat. Returns the number of tokens that were found in the prefix cache.

    steps: (operation, request id, random seed) of each operation.
    """
    for operation, request_id, seed in steps:
        rng = np.random.default_rng(seed)
        known = request_id in driver.requests
        if operation == "admit" and not known:
            length = int(rng.integers(1, 14))
            tokens = ([1, 1, 2, 1] * 4)[:length] if rng.random() < 0.7 else rng.integers(1, 3, length).tolist()
            groups = GROUPS[int(rng.integers(len(GROUPS)))]
            driver.admit(request_id, "" if rng.random() < 0.8 else "s", tokens, groups)
        elif operation in ("step", "stop") and known:
            accepted = rng.integers(1, 3, int(rng.integers(0, 4))).tolist()
            if not driver.step(request_id, int(rng.integers(1, 6)), accepted, 1, stops=operation == "stop"):
                driver.release(request_id)
        elif operation == "catch_up" and known:
            driver.catch_up(request_id, int(rng.integers(1, 20)))
        elif operation == "release" and known:
            driver.release(request_id)
        driver.check_all()
    return driver.num_hits


@given(
    steps=operations, num_blocks=st.integers(3, 24), block_size=st.integers(1, 4), kept=st.none() | st.integers(0, 4)
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_found_is_what_was_asked_for(
    steps: list[tuple[str, str, int]], num_blocks: int, block_size: int, kept: int | None
) -> None:
    driver = Driver(make(num_blocks, block_size, kept), num_blocks, block_size)
    run(driver, steps)
    for request_id in list(driver.requests):
        driver.release(request_id)
    assert driver.manager.num_free_blocks == num_blocks


def random_steps(seed: int, number: int = 400) -> list[tuple[str, str, int]]:
    rng = np.random.default_rng(seed)
    kinds = ["admit", "step", "step", "catch_up", "release", "stop"]
    return [(str(rng.choice(kinds)), str(rng.choice(IDS)), int(rng.integers(2**31))) for _ in range(number)]


def test_much_is_found() -> None:
    found = sum(run(Driver(make(20, 2), 20, 2), random_steps(seed)) for seed in range(3))
    assert found > 100


def without_the_text_before(patch: pytest.MonkeyPatch) -> None:
    def hash_blocks(self: Text, token_ids: np.ndarray, block_size: int) -> None:
        for start in range((len(self.digests) - 1) * block_size, len(token_ids) - block_size + 1, block_size):
            self.digests.append(token_ids[start : start + block_size].tobytes())

    patch.setattr(Text, "hash_blocks", hash_blocks)


def without_the_salt(patch: pytest.MonkeyPatch) -> None:
    admit = PrefixKVManager.admit
    patch.setattr(
        PrefixKVManager, "admit", lambda self, id_, tokens, salt, groups: admit(self, id_, tokens, "", groups)
    )


def without_what_follows(patch: pytest.MonkeyPatch) -> None:
    add_group = PrefixKVManager.add_group
    patch.setattr(
        PrefixKVManager,
        "add_group",
        lambda self, layout, owner="target", lookahead=0: add_group(self, layout, owner, 0),
    )


def past_a_stop(patch: pytest.MonkeyPatch) -> None:
    """Patch a fault into the KV manager: it publishes blocks beyond the request's last token, as if the tokens there
    were all 1."""
    publish = PrefixKVManager._publish

    def careless(self: Any, text: Any, blocks: Any, token_ids: Any, num_final: int) -> None:
        padded = np.concatenate([token_ids, np.ones(max(0, num_final - len(token_ids)), dtype=np.int64)])
        publish(self, text, blocks, padded, num_final)

    patch.setattr(PrefixKVManager, "_publish", careless)


def drafts_that_were_not_filled(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Any, requests: Any, counts: Any, original: Callable[..., None] = PrefixKVManager.advance) -> None:
        for request in requests:
            text = self._texts[request.id]
            text.filled = dict.fromkeys(text.filled, 10**6)
        original(self, requests, counts)

    patch.setattr(PrefixKVManager, "advance", advance)


def groups_that_were_not_asked_for_are_filled(patch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, group: int, request_ids: Any, num_tokens: Any) -> None:
        for request_id, filled in zip(request_ids, num_tokens, strict=True):
            self._texts[request_id].filled[group] = filled

    patch.setattr(PrefixKVManager, "fill", fill)


def groups_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    find = SharedBlocks.find
    patch.setattr(SharedBlocks, "find", lambda self, keys: find(self, {key for key in keys if key[0] == 0}))


def a_held_block_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    """Patch a fault into the block pool: a cached block stays in the LRU cache when a request takes it, so that it can
    be evicted while in use."""
    patch.setattr(SharedBlocks, "hold", lambda self, blocks: self._holders.update(blocks))


def given_up_and_still_found(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: Any, number: int) -> None:
        for _ in range(min(number, len(self._kept))):
            block, _ = self._kept.popitem(last=False)
            self._free.append(block)

    patch.setattr(SharedBlocks, "_give_up", give_up)


@pytest.mark.parametrize(
    "fault",
    [
        without_the_text_before,
        without_the_salt,
        without_what_follows,
        past_a_stop,
        drafts_that_were_not_filled,
        groups_that_were_not_asked_for_are_filled,
        groups_are_not_looked_at,
        a_held_block_is_handed_out,
        given_up_and_still_found,
    ],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_noticed(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_all()


def run_all() -> None:
    stop_within_a_draft()
    for seed in range(12):
        run(Driver(make(14, 2), 14, 2), random_steps(seed))


def stop_within_a_draft() -> None:
    """Check that a block is not shared if it contains draft tokens that were accepted after a stop token."""
    driver = Driver(make(8, 2), 8, 2)
    driver.admit("a", "", [1, 1, 1], ())
    driver.step("a", 3, [2, 2, 2], 2, stops=True)
    driver.admit("b", "", [1, 1, 1, 1, 1], ())
    assert driver.requests["b"].num_cached == 2


def test_tokens_after_a_stop_are_not_found() -> None:
    stop_within_a_draft()


def test_the_least_recently_used_is_given_up_first() -> None:
    driver = Driver(make(6, 2), 6, 2)
    for name, tokens in (("a", [1, 1, 1]), ("b", [2, 2, 2]), ("c", [3, 3, 3])):
        driver.admit(name, "", tokens, ())
        driver.step(name, 3, [], 9)
        driver.release(name)
    driver.admit("a", "", [1, 1, 1], ())  # now the most recently used
    driver.release("a")
    driver.admit("big", "", list(range(10, 19)), ())  # all blocks but one
    driver.release("big")
    assert driver.manager.admit("x", np.array([1, 1, 1]), "", ()) == 2
    assert driver.manager.admit("y", np.array([2, 2, 2]), "", ()) == 0


def test_of_two_blocks_with_the_same_contents_the_other_is_found_when_one_is_given_up() -> None:
    pool = SharedBlocks(4, 2, most_kept=4)
    for name in "ab":
        pool.add(name)
        pool.grow(name, 2)
        pool.publish(pool.blocks(name)[0], "the same")
    (other,) = pool.blocks("b")
    pool.drop("a")
    pool.add("c")
    pool.grow("c", 6)  # all blocks but b's
    assert pool.find({"the same"}) == other


def test_nothing_is_found_where_all_has_to_be_computed() -> None:
    driver = Driver(make(8, 2), 8, 2)
    driver.admit("a", "", [1, 1, 1, 1, 1], ())
    driver.step("a", 5, [], 9)
    assert driver.manager.admit("b", np.empty(0, dtype=np.int64), "", ()) == 0
    assert driver.manager.admit("c", np.array([1, 1, 1, 1]), "", ()) == 2, "the last token is computed again"


def test_interrupts_lose_no_block() -> None:
    """KeyboardInterrupt is raised once before each bytecode instruction of the block pools. Each time, no block is lost
    and the reference counts are right."""

    def use(pool: SharedBlocks) -> None:
        pool.add("a")
        pool.grow("a", 32)
        for block in pool.blocks("a")[:3]:
            pool.publish(block, ("contents of", block))
        pool.add("b", pool.blocks("a")[:2])
        pool.grow("b", 40)
        pool.shrink("a", 9)
        pool.drop("a")
        pool.drop("b")
        pool.add("a")
        pool.grow("a", 128)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename not in (BASE.__file__, SHARED.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_left -= 1
            if num_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    k, num_left, before = 0, 0, sys.gettrace()
    while num_left <= 0:
        k += 1
        num_left, pool = k, SharedBlocks(16, 8, most_kept=2)
        try:
            sys.settrace(trace)
            use(pool)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        pool.check_integrity()
        for name in "ab":
            pool.drop(name)
        assert pool.num_free == 16, f"the {k}th instruction"
        pool.add("c")
        pool.grow("c", 128)
        pool.check_integrity()
    assert k > 500
