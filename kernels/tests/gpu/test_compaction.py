"""Keys and values moved by a Triton kernel, against torch's copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec_core.contracts.kv import KVContext, KVLayout
from specdec_core.contracts.verifier import Verdict
from specdec_core.kv import PagedKVManager
from specdec_core.ops import REFERENCE
from specdec_kernels.gpu import OPS, compaction

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


def storage(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, NaN among them."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)).view(dtype).squeeze(-1)


def moves(seed: int, num_nodes: list[int], share: float) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number of slots of all requests, and the moves of their accepted paths. Each has so many nodes, a share of
    which is on its path, and its slots are anywhere in the cache."""
    random = np.random.default_rng(seed)
    slots = random.permutation(sum(num_nodes))
    found: list[tuple[int, int]] = []
    for table in np.split(slots, np.cumsum(num_nodes)[:-1]):
        path = np.flatnonzero(random.random(len(table)) < share)
        found += [(table[node], table[step]) for step, node in enumerate(path) if node != step]
    source, destination = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).T
    return len(slots), source, destination


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.lists(st.integers(1, 40) | st.sampled_from([255, 256]), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.99]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 5, 64, 100]), st.sampled_from([1, 128])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_slots_are_moved_as_if_at_once(
    num_nodes: list[int], share: float, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    num_layers, num_heads, key_dim, value_dim = shape
    num_slots, source, destination = moves(seed, num_nodes, share)
    keys = storage(seed, dtype, num_layers, num_slots + 1, num_heads, key_dim)
    values = storage(seed + 1, dtype, num_layers, num_slots + 1, num_heads, value_dim)
    expected = keys.clone(), values.clone()
    REFERENCE["compact"](*(each.view(compaction.INTEGERS[each.itemsize]) for each in expected), source, destination)
    OPS["compact"](keys, values, source, destination)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


@pytest.mark.parametrize("shift", [1, compaction.MOVES - 1, compaction.MOVES, compaction.MOVES + 1])
def test_long_paths_whose_slots_overlap(shift: int) -> None:
    """A path behind `shift` refused nodes: most slots are read and then written."""
    keys, values = storage(0, torch.float32, 2, 300, 2, 8), storage(1, torch.float32, 2, 300, 2, 8)
    expected = keys.clone()
    expected[:, 5 : 5 + 200] = keys[:, 5 + shift : 5 + shift + 200]
    OPS["compact"](keys, values, torch.arange(200) + 5 + shift, torch.arange(200) + 5)
    assert torch.equal(bits(keys), bits(expected))


def test_slots_that_are_not_contiguous() -> None:
    keys, values = (storage(i, torch.float32, 2, 3, 20, 8).transpose(1, 2) for i in range(2))  # heads first
    expected = keys.clone(), values.clone()
    source, destination = torch.tensor([3, 7]), torch.tensor([1, 3])
    REFERENCE["compact"](*expected, source, destination)
    OPS["compact"](keys, values, source, destination)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


def test_layers_may_have_others_between_them() -> None:
    every = storage(0, torch.float32, 4, 20, 2, 8)
    before = every.clone()
    OPS["compact"](every[::2], every[1::2], torch.tensor([3, 7]), torch.tensor([1, 3]))
    before[:, [1, 3]] = before[:, [3, 7]]
    assert torch.equal(bits(every), bits(before))


def test_the_kv_manager_moves_with_the_operation_that_it_is_given() -> None:
    """Of two requests with trees, after verification, in groups of layers of different shapes."""
    caches = []
    for compact in (None, OPS["compact"]):
        manager = PagedKVManager(KVContext(40, 4, torch.device("cpu"), compact))
        groups = [
            manager.add_group(KVLayout(2, heads, width, width, torch.float32, keeps_nodes=True))
            for heads, width in ((1, 8), (3, 7))
        ]
        for name in "ab":
            manager.admit(name, np.arange(5), "", ())
            manager.reserve(name, 5, 30)
        layers = [manager.cache(group, layer) for group in groups for layer in range(2)]
        for number, (keys, values) in enumerate(layers):
            keys.copy_(storage(number, torch.float32, *keys.shape))
            values.copy_(storage(number + 9, torch.float32, *values.shape))
        rows = torch.tensor([[0, 2, 3, 9, 20], [31, 34, 35, -1, -1]], dtype=torch.int32)
        manager.compact(["a", "b"], [5, 5], Verdict(rows.long(), rows, torch.tensor([4, 2], dtype=torch.int32)))
        caches.append([bits(each) for layer in layers for each in layer])
    assert all(map(torch.equal, *caches))
    untouched = bits(storage(0, torch.float32, *layers[0][0].shape))
    assert not torch.equal(caches[0][0], untouched)
