"""Deliberate faults in the proposer of probe_draft.py, or in what the engine does for this proposer. The target is
unaffected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import probe_draft
import pytest
import torch
from attrs import evolve
from probe_draft import Probe

from specdec_core.kv import PagedKVManager
from specdec_core.models.attention import PagedAttention
from specdec_kv_prefix.manager import PrefixKVManager

Patch = pytest.MonkeyPatch


def _change_metadata(patch: Patch, during: str, change: Callable[..., tuple[Any, ...]]) -> None:
    """Patch one method of the proposer so that its forward passes use other KV-cache slots.

    during: the method's name.
    change: a function that takes and returns the three arguments of `metadata`: requests, starts, lengths.
    """
    metadata, method = PagedAttention.metadata, getattr(Probe, during)
    within = []

    def noted(self: Any, *args: Any) -> Any:
        within.append(during)
        try:
            return method(self, *args)
        finally:
            within.pop()

    patch.setattr(Probe, during, noted)
    patch.setattr(PagedAttention, "metadata", lambda self, *args: metadata(self, *(change(*args) if within else args)))


def zero_the_cache(patch: Patch) -> None:
    """Fill new KV caches with zeros. Some faults read unwritten memory, which could otherwise hold any values."""
    add_group = PagedKVManager.add_group

    def zeroed(self: Any, layout: Any, *others: Any) -> int:
        number = add_group(self, layout, *others)
        for layer in range(layout.num_layers):
            for storage in self.cache(number, layer):
                storage.zero_()
        return number

    patch.setattr(PagedKVManager, "add_group", zeroed)


def a_drafted_entry_stays_when_its_node_is_accepted(patch: Patch) -> None:
    """A deliberate fault: in decode steps `observe` writes only the root's KV-cache entry, so accepted draft tokens
    keep the entries written while drafting."""
    observe, forwarding = Probe.observe, PagedAttention.forwarding
    skipped: list[torch.Tensor] = []

    def stale(self: Any, observation: Any) -> None:
        is_node = torch.zeros(observation.offsets[-1], dtype=torch.bool)
        for i, request in enumerate(observation.requests):
            if observation.starts[i] >= request.num_prompt_tokens:
                is_node[observation.offsets[i] + 1 : observation.offsets[i + 1]] = True
        skipped.append(is_node)
        observe(self, observation)
        skipped.pop()

    @contextmanager
    def skipping(self: Any, metadata: Any, visibility: Any, **more: Any) -> Iterator[None]:
        if skipped:
            metadata = evolve(metadata, slot_mapping=metadata.slot_mapping.masked_fill(skipped[-1], -1))
        with forwarding(self, metadata, visibility, **more):
            yield

    patch.setattr(Probe, "observe", stale)
    patch.setattr(PagedAttention, "forwarding", skipping)


def nodes_are_stored_a_slot_early(patch: Patch) -> None:
    _change_metadata(patch, "propose", lambda requests, starts, n: (requests, [start - 1 for start in starts], n))


def chunks_are_stored_a_slot_early(patch: Patch) -> None:
    early = lambda requests, starts, n: (requests, [max(0, start - 1) for start in starts], n)  # noqa: E731
    _change_metadata(patch, "observe", early)


def nodes_stand_a_position_late(patch: Patch) -> None:
    positions = probe_draft.node_positions
    patch.setattr(probe_draft, "node_positions", lambda roots, depth: positions(roots, depth) + 1)


def _change_observation(patch: Patch, change: Callable[[Any], Any]) -> None:
    observe = Probe.observe
    patch.setattr(Probe, "observe", lambda self, observation: observe(self, change(observation)))


def the_next_token_is_that_of_another_request(patch: Patch) -> None:
    _change_observation(patch, lambda seen: evolve(seen, next_token_ids=seen.next_token_ids.roll(1)))


def the_last_token_is_its_own_next(patch: Patch) -> None:
    _change_observation(patch, lambda seen: evolve(seen, next_token_ids=seen.token_ids[seen.last_rows]))


def preemption_is_ignored(patch: Patch) -> None:
    patch.setattr(Probe, "reset", lambda self, request: None)


def refused_nodes_are_observed(patch: Patch) -> None:
    def count_all(seen: Any) -> Any:
        ends = torch.tensor(seen.offsets[1:])
        return evolve(seen, num_valid=ends.diff(prepend=ends.new_zeros(1)).int(), last_rows=ends - 1)

    _change_observation(patch, count_all)


def nodes_see_their_siblings(patch: Patch) -> None:
    forwarding = PagedAttention.forwarding

    @contextmanager
    def seeing(self: Any, metadata: Any, visibility: Any, **more: Any) -> Iterator[None]:
        if visibility.more_slots is not None and self.places[0][0] != 0:
            last = visibility.more_slots.amax(dim=1)
            visibility = evolve(visibility, prefix_lens=torch.maximum(visibility.prefix_lens, last + 1))
        with forwarding(self, metadata, visibility, **more):
            yield

    patch.setattr(PagedAttention, "forwarding", seeing)


def what_follows_a_slot_is_ignored(patch: Patch) -> None:
    """A deliberate fault: the prefix cache ignores `lookahead`, so the last entry of a shared block may have been
    computed from the next token of another request."""
    add_group = PrefixKVManager.add_group

    def blind(self: Any, layout: Any, owner: str = "target", lookahead: int = 0) -> int:
        return add_group(self, layout, owner, 0)

    patch.setattr(PrefixKVManager, "add_group", blind)


def more_is_filled_than_was_stored(patch: Patch) -> None:
    """A deliberate fault: only the first chunk of a prompt is written to the KV cache, but the KV manager is told that
    all chunks are."""
    forwarding, observe = PagedAttention.forwarding, Probe.observe
    within: list[bool] = []

    def noted(self: Any, observation: Any) -> None:
        within.append(any(start > 0 for start in observation.starts))
        try:
            observe(self, observation)
        finally:
            within.pop()

    @contextmanager
    def forgetting(self: Any, metadata: Any, visibility: Any, **more: Any) -> Iterator[None]:
        if within and within[-1]:
            metadata = evolve(metadata, slot_mapping=metadata.slot_mapping.new_full(metadata.slot_mapping.shape, -1))
        with forwarding(self, metadata, visibility, **more):
            yield

    patch.setattr(Probe, "observe", noted)
    patch.setattr(PagedAttention, "forwarding", forgetting)


def observing_begins_at_0(patch: Patch) -> None:
    """A deliberate fault: the proposer ignores that the request's first tokens are in the prefix cache, and writes
    observed entries from slot 0 on."""

    def from_0(seen: Any) -> Any:
        cached = [request.num_cached_tokens for request in seen.requests]
        return evolve(seen, starts=tuple(start - n for start, n in zip(seen.starts, cached, strict=True)))

    _change_observation(patch, from_0)


CACHE_FAULTS: list[Callable[[Patch], None]] = [
    what_follows_a_slot_is_ignored,
    more_is_filled_than_was_stored,
    observing_begins_at_0,
]

FAULTS: list[Callable[[Patch], None]] = [
    a_drafted_entry_stays_when_its_node_is_accepted,
    nodes_are_stored_a_slot_early,
    chunks_are_stored_a_slot_early,
    nodes_stand_a_position_late,
    the_next_token_is_that_of_another_request,
    the_last_token_is_its_own_next,
    preemption_is_ignored,
    refused_nodes_are_observed,
    nodes_see_their_siblings,
]
