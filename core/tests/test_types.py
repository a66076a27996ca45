"""Drafts made from arrays equal drafts made from lists. A draft that was sent to a device keeps copies on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.overrides import TorchFunctionMode

from specdec_core import Draft, DraftTree
from specdec_core.contracts.draft import DEAD
from specdec_core.engine.draft_check import check_draft
from specdec_core.verifiers.accepted_and_bonus import follow

TREES = [DraftTree([5, 6, 9], [-1, -1, 0]), DraftTree([], []), DraftTree([4], [-1])]


def test_from_arrays_is_from_trees() -> None:
    wanted = Draft.from_trees(TREES)
    draft = Draft.from_arrays(
        np.array([5, 6, 9, 4]),
        np.array([-1, -1, 0, -1], dtype=np.int32),
        [3, 0, 1],
        max_depth=2,
        scores=np.array([0.5, 0.25, 1, 1], dtype=np.float32),
    )
    assert (draft.offsets, draft.max_depth, draft.is_chain) == (wanted.offsets, wanted.max_depth, False)
    assert [draft.tree(i) for i in range(3)] == TREES
    assert (draft.token_ids.dtype, draft.parents.dtype) == (wanted.token_ids.dtype, wanted.parents.dtype)
    assert draft.scores is not None
    assert draft.scores.dtype == torch.float32


def test_from_arrays_shares_memory_on_a_cpu() -> None:
    token_ids = np.array([1, 2])
    draft = Draft.from_arrays(token_ids, np.array([-1, 0], dtype=np.int32), [2], 2, is_chain=True)
    token_ids[0] = 7
    assert draft.token_ids.tolist() == [7, 2]


META = torch.device("meta")
"""A device without data: nothing can be read from it."""
ARRAYS = (np.array([5, 6, 9, 4]), np.array([-1, -1, 0, DEAD], dtype=np.int32), [3, 0, 1], 2)
MAKERS: dict[str, Callable[[Any], Draft]] = {
    "from_chains": lambda device: Draft.from_chains([[5, 6], [], [4]], device),
    "from_trees": lambda device: Draft.from_trees(TREES, device),
    "from_arrays": lambda device: Draft.from_arrays(*ARRAYS, scores=np.ones(4, dtype=np.float32), device=device),
    "to": lambda device: Draft.from_trees(TREES).to(device),
    "to, twice": lambda device: Draft.from_trees(TREES).to(device).to(device),
}


class Downloads(TorchFunctionMode):
    """A context manager that counts copies from the device to the host. The meta device stands in for a GPU.

    data: pairs of a meta tensor and a host tensor with its values.
    """

    READ = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)

    def __init__(self, *data: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.count, self.data = 0, {id(of): values for of, values in data}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READ and args[0].device.type == "meta":
            self.count += 1
            return func(self.data[id(args[0])])
        return func(*args, **kwargs or {})


def everything_that_the_engine_reads(draft: Draft) -> None:
    check_draft(draft, [5] * draft.batch_size, 10, draft.token_ids.device)
    draft.host_layout.to(torch.device("cpu"))
    assert len(draft.host_token_ids) == len(draft.host_parents) == draft.num_nodes
    assert len(draft.num_live_per_request) == draft.batch_size
    rows = draft.num_nodes + draft.batch_size
    follow(torch.zeros(rows, dtype=torch.int64), draft)
    draft.tree(0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_the_host_made_is_not_read_back(make: Callable[[Any], Draft]) -> None:
    here, there = make("cpu"), make(META)
    assert there.token_ids.device == there.parents.device == META
    assert [there.tree(i) for i in range(3)] == [here.tree(i) for i in range(3)]
    assert there.num_live_per_request == here.num_live_per_request
    assert (there.host_token_ids.dtype, there.host_parents.dtype) == (np.int64, np.int32)
    assert here.host_copies == ()
    with Downloads() as downloads:
        everything_that_the_engine_reads(make(META))
        everything_that_the_engine_reads(evolve(there, offsets=(0, *there.offsets)))
    assert downloads.count == 0


def test_what_a_device_made_is_read_once() -> None:
    here = Draft.from_trees(TREES)
    draft = evolve(here.to(META), host_copies=())
    with Downloads((draft.token_ids, here.token_ids), (draft.parents, here.parents)) as downloads:
        for _ in range(2):
            everything_that_the_engine_reads(draft)
    assert downloads.count == 2, "token ids and parents"


def test_a_changed_draft_has_no_copies() -> None:
    draft = Draft.from_trees(TREES).to(META)
    for changed in (evolve(draft, token_ids=draft.token_ids + 1), evolve(draft, parents=draft.parents.clone())):
        assert not changed.is_on_host(changed.token_ids, changed.parents)
    more = draft.token_ids + 1
    with Downloads((more, torch.arange(4))) as downloads:
        assert evolve(draft, token_ids=more).host_token_ids.tolist() == [0, 1, 2, 3]
    assert downloads.count == 1


def test_a_copy_that_stands_for_whatever_tensor_is_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = Draft.on_host

    def first_copy(draft: Draft, tensor: torch.Tensor) -> np.ndarray:
        return draft.host_copies[0].values if draft.host_copies else on_host(draft, tensor)

    monkeypatch.setattr(Draft, "on_host", first_copy)
    with pytest.raises(AssertionError):
        test_a_changed_draft_has_no_copies()


def test_back_on_a_cpu_there_are_no_copies() -> None:
    draft = Draft.from_trees(TREES)
    there = draft.to(META)
    assert {id(copy.of) for copy in there.host_copies} == {id(there.token_ids), id(there.parents)}
    assert evolve(there, token_ids=draft.token_ids, parents=draft.parents).to("cpu").host_copies == ()


def test_live_nodes_are_counted() -> None:
    draft = Draft.from_trees([DraftTree([1, 2, 3, 4], [-1, DEAD, 1, 0]), DraftTree([], []), DraftTree([7], [DEAD])])
    assert draft.num_live_per_request == [2, 0, 0]
    assert Draft.from_trees(TREES).num_live_per_request == [3, 0, 1]
    assert Draft.from_chains([[], []]).num_live_per_request == [0, 0]
