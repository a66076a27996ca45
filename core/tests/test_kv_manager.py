"""Tests of PagedKVManager: the conformance kit, and where its slots are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_core.contracts.kv import KVContext, KVLayout
from specdec_core.errors import CapacityError
from specdec_core.kv import PagedKVManager
from specdec_testing import KVManagerConformance

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, key_dim=3, value_dim=2, dtype=torch.float32, keeps_nodes=True)


class TestPaged(KVManagerConformance):
    kv_manager = "paged"


def paged(num_blocks: int, block_size: int) -> PagedKVManager:
    return PagedKVManager(KVContext(num_blocks, block_size, torch.device("cpu")))


def test_padding_row_is_the_last_and_takes_writes_to_minus_one() -> None:
    manager = paged(3, 4)
    group = manager.add_group(LAYOUT)
    manager.admit("a", np.arange(12), "", ())
    manager.reserve("a", 12, 0)
    keys, values = manager.cache(group, 0)
    assert keys.shape == (13, 2, 3)
    assert values.shape == (13, 2, 2)
    keys.zero_()
    keys[torch.tensor([-1])] = 1.0
    slots = manager.metadata(["a"], [0], [12]).slot_mapping
    assert sorted(slots.tolist()) == list(range(12))
    assert not keys[slots].any()


def test_metadata_of_inner_intervals_addresses_the_same_slots() -> None:
    manager = paged(8, 4)
    manager.add_group(LAYOUT)
    manager.admit("a", np.arange(10), "", ())
    manager.reserve("a", 10, 3)
    manager.admit("b", np.arange(5), "", ())
    manager.reserve("b", 5, 0)
    whole = manager.metadata(["a", "b"], [0, 0], [13, 5]).slot_mapping.tolist()
    inner = manager.metadata(["b", "a"], [2, 9], [3, 4]).slot_mapping.tolist()
    assert inner == whole[13 + 2 :] + whole[9:13]
    assert manager.metadata(["a"], [4], [0]).slot_mapping.shape == (0,)


def test_slots_past_what_a_request_owns_are_refused() -> None:
    """Asking for KV-cache slots past a request's own blocks raises CapacityError."""
    manager = paged(8, 4)
    manager.add_group(LAYOUT)
    manager.admit("a", np.arange(5), "", ())
    manager.reserve("a", 5, 3)
    manager.admit("b", np.arange(9), "", ())
    manager.reserve("b", 9, 0)
    assert len(manager.metadata(["a", "b"], [5, 0], [3, 12]).slot_mapping) == 15
    with pytest.raises(CapacityError, match=r"'a' holds 8 KV slots.*\[5, 9\).*scratch_slots"):
        manager.metadata(["a", "b"], [5, 0], [4, 12])
