"""The contract of a KV manager, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from specdec_core.types import KVLayout, KVMetadata, Verdict

if TYPE_CHECKING:
    import torch


class KVManager(Protocol):
    """Keys and values of all requests, in blocks of `block_size` slots.

    The slots of one request in one pass, half-open: `[0, num_computed)` committed, `[num_computed, num_computed +
    num_known)` tokens known before the pass with the root last, then one slot per draft node in the draft's order.
    Groups (the target's layers, a draft's layers) share each request's block table, not the storage.
    """

    def add_group(self, layout: KVLayout) -> int:
        """Allocate storage for a group of layers; returns its number. The first group is the target's."""
        ...

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_slots + 1, num_kv_heads, key_dim] and values [..., value_dim]. Slot `block * block_size + i`; the
        last row, which is also index -1, takes what padding writes and is never read."""
        ...

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        """Own enough blocks for the slots [0, num_tokens + num_scratch): num_tokens counts the committed and the known
        tokens, num_scratch the draft nodes. A new id is admitted. Raises CapacityError and changes nothing if there
        are not enough free blocks."""
        ...

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        """Addresses of the slot intervals [start, start + length) of these requests, for any group. Raises
        CapacityError where one ends past the blocks that its request owns."""
        ...

    def commit(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        """After a pass: advance by num_known + num_accepted tokens. In groups that keep nodes, the target's first, the
        accepted path is moved to follow the root without a gap; blocks beyond the committed tokens become free. The
        verdict is on the host."""
        ...

    def release(self, request_id: str) -> None:
        """Free the request's blocks (finished, cancelled or preempted). Unknown ids are ignored."""
        ...

    @property
    def num_free_blocks(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one place."""
        ...


@frozen(eq=False)
class KVManagerSpec:
    """A KV manager as data: returned by the hook `specdec_kv_managers`. build(num_blocks, block_size, device)."""

    name: str
    build: Callable[[int, int, torch.device], KVManager]
    api: int
