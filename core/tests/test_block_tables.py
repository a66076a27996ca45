"""Block tables follow every change of a request's blocks, on the host and on a device, and write only what changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings, strategies as st

from specdec_core.contracts.kv import KVContext
from specdec_core.kv import BlockPool, PagedKVManager
from specdec_core.kv.block_tables import BlockTables
from specdec_core.kv.device_tables import DeviceTables
from specdec_testing.pretend_cuda import CUDA, PretendCuda


@frozen
class View:
    """A stand-in for a RequestView (a request as plugins see it), with what `KVManager.advance` reads."""

    id: str
    token_ids: np.ndarray


IDS = list("abcdefghijkl")

Change = tuple[str, str, int]
changes = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "shrink", "drop", "read"]), st.sampled_from(IDS), st.integers(0, 90)),
    max_size=60,
)


def rebuilt(pool: BlockPool, ids: list[str]) -> list[list[int]]:
    return [pool.blocks(request_id) for request_id in ids]


def apply(pool: BlockPool, change: Change) -> None:
    kind, request_id, size = change
    if kind == "drop":
        pool.drop(request_id)
        return
    if request_id not in pool:
        pool.add(request_id)
    if kind == "grow":
        pool.grow(request_id, size)
    elif kind == "shrink":
        pool.shrink(request_id, size)


def check(pool: BlockPool, device: DeviceTables, ids: list[str]) -> None:
    tables, expected = pool.tables(ids), rebuilt(pool, ids)
    assert len(tables) == len(ids)
    assert [row[: len(blocks)].tolist() for row, blocks in zip(tables, expected, strict=True)] == expected
    assert not any(row[len(blocks) :].any() for row, blocks in zip(tables, expected, strict=True))
    assert np.array_equal(device.of(ids).cpu().numpy(), tables)
    assert pool.tables(ids) is tables, "forward passes of a step share one array"


def compare(plan: list[Change], orders: list[int]) -> None:
    """Apply changes of a pool's block tables, and compare them after each with tables rebuilt from the lists."""
    pool = BlockPool(90 * len(IDS), 1)
    with PretendCuda():
        device = DeviceTables(pool, CUDA)
        for change, order in zip(plan, orders, strict=False):
            apply(pool, change)
            held = [i for i in IDS if i in pool]
            rng = np.random.default_rng(order)
            if order % 3 == 0:
                check(pool, device, held)
            elif order % 3 == 1:
                check(pool, device, list(rng.permutation(held)[: rng.integers(len(held) + 1)]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes, st.lists(st.integers(0, 100), min_size=60, max_size=60))
def test_tables_equal_rebuilt_ones(plan: list[Change], orders: list[int]) -> None:
    compare(plan, orders)


PLAN = [
    *[("grow", i, 20) for i in "abcd"],
    *[("shrink", "b", 7), ("grow", "c", 33), ("drop", "a", 0), ("grow", "b", 11), ("grow", "e", 9), ("drop", "c", 0)],
    *[("grow", "a", 2), ("shrink", "a", 0), ("grow", "d", 90)],
]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (BlockTables, "change", lambda change: lambda self, i, start: None),
        (BlockTables, "change", lambda change: lambda self, i, start: change(self, i, start + 1)),
        (BlockTables, "take_written", lambda take: lambda self: take(self)[:-1]),
        (BlockTables, "_note", lambda note: lambda self, row, start, end: note(self, row, start, start)),
    ],
)
def test_comparison_notices(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Callable[[Any], Any]
) -> None:
    compare(PLAN, [0] * len(PLAN))
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with pytest.raises((AssertionError, KeyError, IndexError)):
        compare(PLAN, [0] * len(PLAN))


def run_steps(device: torch.device, num_steps: int, uploads: list[int]) -> list[int]:
    """Decode with a draft tree at a long context, and return how many entries of block tables each step wrote.

    uploads: gets the number of elements of each tensor that was copied to the pretend device.
    """
    pool = BlockPool(8 * 2200, 16)
    manager = PagedKVManager(KVContext(pool.num_blocks, 16, device), pool)
    ids, lengths, counts = IDS[:8], [32768 - 5 * i for i in range(8)], []
    for request_id, length in zip(ids, lengths, strict=True):
        manager.admit(request_id, np.arange(0), "", ())
        manager.reserve(request_id, length, 0)
        manager.advance([View(request_id, np.arange(0))], [length])
    for _ in range(num_steps):
        del uploads[:]
        if device.type == "cpu":
            pool.rows.take_written()
        for request_id, length in zip(ids, lengths, strict=True):
            manager.reserve(request_id, length + 1, 59)
        found = [manager.metadata(ids, lengths, [8] * 8).block_tables for _ in range(9)]
        assert all(torch.equal(each, found[0]) for each in found)
        if device.type == "cpu":
            assert np.shares_memory(found[-1].numpy(), pool.rows.array()), "a view, not a copy"
            counts.append(len(pool.rows.take_written()))
        else:
            slots = 9 * 8 * 8
            counts.append(sum(uploads) - slots)
        manager.advance([View(i, np.arange(0)) for i in ids], [4] * 8)
        lengths = [length + 4 for length in lengths]
    return counts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_writes_only_what_it_appends(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A step reserves 60 slots for each of 8 requests, which are at most 5 blocks, and frees as many."""
    most = 8 * 5 * (1 if device == "cpu" else 2)  # an upload has each entry's index, too
    with PretendCuda() as pretend:
        counts = run_steps(torch.device(device), 4, pretend.uploads)
        assert 0 < max(counts[1:]) <= most
        change = BlockTables.change
        monkeypatch.setattr(BlockTables, "change", lambda self, request_id, start: change(self, request_id, 0))
        assert max(run_steps(torch.device(device), 4, pretend.uploads)[1:]) > 8 * 2048, "a rebuilt table is noticed"
