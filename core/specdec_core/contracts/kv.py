"""The contract of a KV manager: shapes of the KV cache, block tables, slots, and how a plugin offers a manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec_core.contracts.verifier import Verdict

if TYPE_CHECKING:
    import numpy as np
    import torch

    from specdec_core.contracts.proposer import RequestView


@frozen
class KVLayout:
    """Shapes of the KV cache of a group of layers of the target or of a draft model. keeps_nodes: draft tokens have the
    same slots as in the target's cache, and `KVManager.compact` moves the keys and values of accepted ones."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    keeps_nodes: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@frozen
class StateTensor:
    """One state of a recurrent layer. shape: for one request."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@frozen
class StateLayout:
    """The states that a request has in recurrent layers, whatever its length. layers: the states of each layer."""

    layers: tuple[tuple[StateTensor, ...], ...]

    @property
    def bytes_per_request(self) -> int:
        return sum(tensor.num_bytes for layer in self.layers for tensor in layer)

    @property
    def most_layer_bytes(self) -> int:
        """The bytes that a request has in the layer with the largest states."""
        return max(sum(tensor.num_bytes for tensor in layer) for layer in self.layers)


@frozen(eq=False)
class KVMetadata:
    """Block tables and slot mapping of a forward pass over KV-cache slots [start, start + length) of each request."""

    starts: tuple[int, ...]  # [batch]
    lengths: tuple[int, ...]  # [batch]
    block_tables: torch.Tensor  # int64 [batch, max_blocks]   padded with block 0
    slot_mapping: torch.Tensor  # int64 [sum of lengths]   where each token's key and value go; -1: nowhere
    block_size: int


@frozen(eq=False)
class Visibility:
    """The attention mask of a forward pass in compact form: a token attends to the first `prefix_lens` KV-cache slots
    of its request and, in tree attention, to single later slots (its ancestors'). Tokens are in the order of
    `KVMetadata.slot_mapping`, followed by padding."""

    positions: torch.Tensor  # int64 [num_tokens]   of the tokens: sliding windows are measured in them
    prefix_lens: torch.Tensor  # int64 [num_tokens]   a token attends to the slots [0, prefix_len)
    more_slots: torch.Tensor | None = None  # int64 [num_tokens, n]   from the token's own up to its root's, which
    #                                         repeats; slots within the prefix are ignored
    num_tree_slots: int | None = None  # an upper bound on the slots of any request from its longest prefix up to the
    #                                    last of more_slots. None: it is read from the device when needed


TARGET = "target"
"""The owner of the target's groups of layers, in `KVManager.add_group`."""


class KVManager(Protocol):
    """Stores the keys and values of all requests, in blocks of `block_size` slots, one token per slot.

    In a forward pass a request has these slots, in order: `num_computed` slots with final keys and values; `num_known`
    slots for prompt or output tokens to compute, the last one being the root of the draft tree; one slot for each draft
    token. Groups of layers (of the target, of a draft model) share each request's block table, not the storage.

    The engine calls, for each request: `admit` when it is scheduled for the first time and again after a preemption; in
    each of its steps `reserve` (again if it drafts), `metadata`, `compact` and `advance`, in this order; `release` when
    it ends or is preempted, or right after `admit` if it does not fit yet. A manager may let requests share blocks that
    no request writes to any more: a request never writes to the slots of tokens that `admit` reported as cached.

    An interrupt (Ctrl-C) may break off any of these calls. The engine then calls `release` for every running request,
    perhaps twice; afterwards all their blocks must be available again. Managers built on `BlockPool` meet this.

    With tensor parallelism each rank has a manager of its own, for its heads, and all get the same calls but `metadata`
    and `num_free_blocks`: what a manager does must follow from these calls alone.
    """

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        """Allocate storage for a group of layers and return its index. A target may have several groups.

        owner: TARGET, whose groups each forward pass of the target fills, or the name of the proposer that has these
            layers: `fill` reports which tokens its group holds.
        lookahead: on how many tokens after its own a slot's keys and values depend (`Plan.lookahead`).
        """

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys [num_slots + 1, num_kv_heads, key_dim] and values (with value_dim). Slot i of a block
        is row `block * block_size + i`. Padding writes to the last row (index -1), which is never read."""

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        """Register a request and return num_cached_tokens: how many of its first tokens have keys and values in the
        cache already, in the target's groups and in `groups`. They fill whole blocks and are fewer than len(token_ids),
        since the last token is always computed, for its logits.

        token_ids: int64 [num_tokens], the prompt and, after a preemption, the output. Empty if all tokens must be
            computed (for prompt_logprobs, after logits that were not finite, and for targets with recurrent layers).
        salt: requests share blocks only with requests of the same salt.
        groups: indices of the groups of draft layers that this request uses.
        """

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        """Give the request enough blocks for num_tokens prompt and output tokens, then num_scratch slots for draft
        tokens or for draft layers. Raises CapacityError, and changes nothing, if too few blocks are free."""

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        """Return the block tables (valid until a request's blocks change) and slot mapping of these requests' slots
        [start, start + length), for all groups. Raises CapacityError if a request has no blocks for its interval."""

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        """After verification, move accepted draft tokens' keys and values to the slots after the num_known[i] known
        tokens of request i, in groups with `keeps_nodes`. The caches are on the device, the verdict on the host."""

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        """Record that a proposer's group holds keys and values of the first num_tokens[i] tokens of request i. `admit`
        counts only these tokens as cached in the group. Called during `Proposer.observe` and `propose`."""

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        """Mark counts[i] more slots of request i as final and free the blocks beyond them. Called on the host at the
        end of a step, before finished requests are released.

        counts[i] may include draft tokens that were accepted after a stop and are not emitted: prefix caching may share
        only the slots of tokens in `RequestView.token_ids`. counts[i] is 0 if the request's logits were not finite.
        """

    def release(self, request_id: str) -> None:
        """Free the blocks of a request that is finished, cancelled or preempted. Unknown ids are ignored."""

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that `reserve` can hand out, including cached blocks that it would evict."""

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost (neither free nor held by a request) or counted twice."""


@frozen
class KVContext:
    """The number and size of blocks and the device of a KV manager. Groups of layers are added afterwards."""

    num_blocks: int
    block_size: int  # slots of a block
    device: torch.device
    compact: Callable[..., None] | None = None  # the operation of this name; None: the reference


@frozen(eq=False)
class KVManagerSpec:
    """Describes a KV manager to the engine; returned by the hook `specdec_kv_managers` before any heavy import.

    name: what users give as `kv_manager`.
    build: called with the config and a KVContext, returns the KVManager. Heavy imports belong here.
    api: the version of the plugin API that the plugin is written for (PLUGIN_API).
    config: attrs class of the manager's own keys in kv_manager_config. None: no keys, and `build` gets None as config.
    bytes_per_block: called with the config, all groups' KVLayouts and block_size, returns the bytes of a block.
    """

    name: str
    build: Callable[[Any, KVContext], KVManager]
    api: int
    config: type | None = None
    bytes_per_block: Callable[[Any, Sequence[KVLayout], int], int] = lambda config, layouts, block_size: (
        block_size * sum(layout.bytes_per_token for layout in layouts)
    )
