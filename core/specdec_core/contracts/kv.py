"""The contract of a KV manager: layouts, addresses, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.contracts.verifier import Verdict

if TYPE_CHECKING:
    import numpy as np
    import torch

    from specdec_core.contracts.proposer import RequestView


@frozen
class KVLayout:
    """The cache of one group of layers. `keeps_nodes`: draft nodes are stored in the target's slots and compacted."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    keeps_nodes: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@frozen(eq=False)
class KVMetadata:
    """Where one pass over half-open slot intervals [start, start + length) of some requests reads and writes."""

    starts: tuple[int, ...]  # [batch]
    lengths: tuple[int, ...]  # [batch]
    block_tables: torch.Tensor  # int64 [batch, max_blocks]   padded with block 0
    slot_mapping: torch.Tensor  # int64 [sum of lengths]   where each token's key and value go; -1: nowhere
    block_size: int


@frozen(eq=False)
class Visibility:
    """Which slots of its own request each token of a pass sees: a prefix, and single ones beyond it (a tree's nodes see
    their ancestors). Tokens are in the order of the pass's slot intervals; what follows them is padding."""

    positions: torch.Tensor  # int64 [num_tokens]   what windows are measured in
    prefix_lens: torch.Tensor  # int64 [num_tokens]   the slots [0, prefix_len)
    more_slots: torch.Tensor | None = None  # int64 [num_tokens, n]   from the token's own up to its root's, which
    #                                         repeats; what lies within the prefix does not count
    num_tree_slots: int | None = None  # at least as many as any request has from its longest prefix up to the last of
    #                                    more_slots. None: who needs it waits for the device


TARGET = "target"
"""The owner of the target's groups."""


class KVManager(Protocol):
    """Keys and values of all requests, in blocks of `block_size` slots.

    The slots of one request in one forward pass, half-open: `[0, num_computed)` final, `[num_computed, num_computed +
    num_known)` tokens known before the pass with the root last, then one slot per draft node in the draft's order.
    Groups (the target's layers, a draft's layers) share each request's block table, not the storage.

    For each request the engine calls `admit` when it is scheduled for the first time and again after a preemption; in
    each of its steps `reserve`, `metadata`, `compact` and `advance`, in this order; `release` at its end, when it is
    preempted, or at once after `admit` if it does not fit yet. A manager may let requests share blocks that nobody
    writes to any more: a request writes to no slot below the tokens that `admit` said are cached.

    An interrupt (Ctrl-C) may break off any of these calls. `release` of every running request follows, perhaps twice,
    and after it no block may be missing. `BlockPool` keeps that promise for managers that are built on it.
    """

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        """Allocate storage for a group of layers; returns its number. A target may have several groups.

        owner: TARGET, or the name of the proposer whose layers they are. Every forward pass of the target fills all of
        its groups; what a draft's group holds is what `fill` says. lookahead: how many tokens after a slot's own its
        contents depend on (`Plan.lookahead`).
        """

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_slots + 1, num_kv_heads, key_dim] and values [..., value_dim]. Slot `block * block_size + i`; the
        last row, which is also index -1, takes what padding writes and is never read."""

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        """Take a request in, without blocks of its own yet. Returns num_cached_tokens: of how many tokens, from the
        first on, the keys and values are there already, in the target's groups and in `groups`.

        Always whole blocks, and fewer than len(token_ids): the last token is computed anew, for its logits. token_ids
        int64 [num_tokens]: prompt and, after a preemption, output; empty where all of it has to be computed (for
        prompt_logprobs, and after logits that were not finite). salt: requests share only with those of the same one.
        groups: those of drafts that this request uses.
        """

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        """Own enough blocks for the slots [0, num_tokens + num_scratch): num_tokens counts the final and the known
        tokens, num_scratch the draft nodes. Raises CapacityError and changes nothing if there are not enough free
        blocks."""

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        """Addresses of the slot intervals [start, start + length) of these requests, for any group. Raises
        CapacityError where one ends past the blocks that its request owns."""

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        """After verification, on the device: in groups that keep nodes, the target's among them, move the accepted
        path's entries to follow the root without a gap. The verdict is on the host."""

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        """A draft's group holds what its layers computed for the first num_tokens[i] tokens of request i. Called while
        the proposer observes or drafts; without it, nothing of the group is found by `admit` later."""

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        """At the end of a step, on the host, before requests that are finished are released: counts[i] more slots of
        request i are final. Blocks beyond them become free.

        The counts may run past the request's tokens, where accepted nodes came after a stop: a manager that lets
        blocks be found later publishes only what `token_ids` covers. 0 where the pass was no use (its logits were not
        finite).
        """

    def release(self, request_id: str) -> None:
        """Free the request's blocks (finished, cancelled or preempted). Unknown ids are ignored."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `reserve` can hand out, those included whose contents would be given up for it."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for."""


@frozen
class KVContext:
    """What the engine tells a KV manager that it builds. The groups are added afterwards."""

    num_blocks: int
    block_size: int  # slots of a block
    device: torch.device


def plain_bytes_per_block(config: Any, layouts: Sequence[KVLayout], block_size: int) -> int:
    """Of a manager that keeps every group as its layout says."""
    return block_size * sum(layout.bytes_per_token for layout in layouts)


@frozen(eq=False)
class KVManagerSpec:
    """A KV manager as data: returned by the hook `specdec_kv_managers`, before anything heavy is imported. Users name
    it as `kv_manager`.

    build: (config, context) -> KVManager. Heavy imports belong here.
    api: the plugin API that the plugin is written for: see PLUGIN_API.
    config: attrs class of the manager's own keys in kv_manager_config; constructing it validates them. None: it has
    none, and build is given None.
    bytes_per_block: (config, layouts of all groups, block_size) -> bytes of a block in all groups, for the memory plan.
    """

    name: str
    build: Callable[[Any, KVContext], KVManager]
    api: int
    config: type | None = None
    bytes_per_block: Callable[[Any, Sequence[KVLayout], int], int] = plain_bytes_per_block
