"""Tests of the cache of earlier outputs: contents, eviction and memory."""

from __future__ import annotations

import numpy as np
import pytest
from suffix_driver import Driver, texts

from specdec_core import ConfigError

MEGABYTE = 1 << 20


def test_outputs_of_earlier_requests_are_drafted():
    driver = Driver()
    driver.run([1, 2], [10, 11, 12, 13, 14])
    assert driver.ask([10, 11]) == [12, 13]
    assert driver.ask([1, 2]) == []  # prompts are not cached


def test_the_first_to_finish_is_the_first_to_go():
    driver = Driver(max_cached_requests=3)
    slow = driver.start([1])
    slow.say(5, 6, 7, 8)
    for start in (10, 20):
        driver.run([1], [start, start + 1, start + 2, start + 3])
    driver.finish(slow)
    assert driver.ask([10, 11]) == []  # the running request takes a place in the cache
    assert driver.ask([5, 6]) == [7, 8]
    assert driver.ask([20, 21]) == [22, 23]


def test_with_lru_the_one_that_is_drafted_from_stays():
    driver = Driver(max_cached_requests=4, eviction="lru")
    for start in (10, 20, 30):
        driver.run([1], [start, start + 1, start + 2, start + 3])
    assert driver.ask([10, 11]) == [12, 13]
    driver.run([1], [40, 41, 42, 43])
    assert driver.ask([10, 11]) == [12, 13]
    assert driver.ask([20, 21]) == []


def test_running_requests_see_each_others_output():
    driver = Driver()
    first, second = driver.start([1, 2]), driver.start([3, 4])
    first.say(10, 11, 12, 13)
    driver.propose(first)
    second.say(10, 11)
    assert driver.propose(second) == [12, 13]


@pytest.mark.parametrize("requests", [{"max_cached_requests": 20}, {"max_memory_mb": 1}])
def test_memory_is_the_same_after_20_times_as_much(requests):
    driver = Driver(**requests)
    sizes, cached = [], []
    for i, text in enumerate(texts(20 * 60, 200, seed=1)):
        driver.run(text[:5], text[5:])
        if i % 60 == 59:
            sizes.append(driver.proposer.num_bytes)
            cached.append(len(driver.proposer.cache.sequences))
    assert driver.proposer.cache.num_removed > 1000
    assert max(sizes[1:]) <= 1.05 * sizes[1]
    assert min(cached) > 10
    if "max_memory_mb" in requests:
        assert max(sizes) - driver.num_own_bytes <= MEGABYTE


@pytest.mark.parametrize("eviction", ["fifo", "lru"])
def test_outputs_that_are_all_alike_keep_within_the_memory(eviction):
    """The memory limit also holds for equal outputs. They share automaton states, so most of the memory is taken by the
    copies of their tokens that the cache keeps."""
    driver = Driver(max_memory_mb=1, eviction=eviction)
    for _ in range(600):
        driver.run([1], range(10, 1010))
        assert driver.proposer.cache.num_bytes <= MEGABYTE
    assert driver.ask(range(500, 510)) == list(range(510, 520))


def test_too_little_memory_for_the_depth_is_refused():
    with pytest.raises(ConfigError, match=r"max_memory_mb=1 is too little for .*max_tree_depth=65536: raise"):
        Driver(max_memory_mb=1, max_tree_depth=65536)


def test_nothing_is_left_of_requests_without_a_cache():
    driver = Driver(max_cached_requests=0)
    for text in texts(30, 300, seed=2):
        driver.run(text[:50], text[50:])
    assert driver.proposer.cache.sequences == []
    assert driver.num_own_states == 0


def test_where_only_running_requests_fill_the_memory_the_oldest_goes_on_without():
    """If running requests alone fill the memory, the cache drops the output of the oldest request. This request still
    gets drafts, from its own tokens and from the outputs of others."""
    driver = Driver(max_memory_mb=1)
    requests = [driver.start([i]) for i in range(4)]
    for text in zip(*texts(4, 12_000, seed=3, num_symbols=5000), strict=True):
        for request, token_id in zip(requests, text, strict=True):
            request.say(token_id)
        if len(requests[0].token_ids) % 500 == 0:
            driver.propose(*requests)
    driver.propose(*requests)
    assert driver.proposer.cache.num_removed >= 1
    assert driver.proposer.cache.num_bytes <= MEGABYTE
    for request in requests:
        request.say(*request.token_ids[100:110])
    assert all(len(draft) > 0 for draft in driver.propose_all(requests))
    for request in requests:
        driver.finish(request)
    assert driver.num_own_states == 0


@pytest.mark.parametrize("batch_size", [1, 2, 17, 64, 256])
def test_a_request_is_drafted_for_as_it_is_alone(batch_size):
    prompts = texts(batch_size, 120, seed=4, num_symbols=4)
    together, alone = Driver(max_cached_requests=0), Driver(max_cached_requests=0)
    requests = [together.start(prompt) for prompt in prompts]
    found = together.propose_all(requests)
    assert found == [alone.ask(prompt) for prompt in prompts]
    assert sum(map(len, found)) > batch_size


def test_a_token_id_may_be_any_of_the_vocabulary():
    driver = Driver(vocab_size=200_000)
    driver.run([0], [199_999, 0, 199_998, 5, 199_999, 0])
    assert driver.ask([199_999, 0]) == [199_998, 5]


def test_long_prompts_take_memory_in_proportion():
    driver = Driver()
    (prompt,) = texts(1, 50_000, seed=5, num_symbols=3000)
    driver.propose(driver.start(prompt))
    assert driver.num_own_bytes < 200 * len(prompt)
    assert np.all(driver.proposer.cache.store.states[:1, 0] == 0)
