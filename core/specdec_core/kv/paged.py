"""Core's KV manager: paged blocks, one block table per request, storage per group of layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from specdec_core.contracts.kv import TARGET, KVContext, KVLayout, KVMetadata
from specdec_core.contracts.proposer import RequestView
from specdec_core.contracts.verifier import Verdict
from specdec_core.errors import CapacityError
from specdec_core.kv.block_pool import BlockPool
from specdec_core.kv.device_tables import DeviceTables
from specdec_core.ops.compaction import compact
from specdec_core.ops.upload import upload


@frozen(eq=False)
class _Group:
    layout: KVLayout
    keys: torch.Tensor  # [num_layers, num_slots + 1, num_kv_heads, key_dim]
    values: torch.Tensor  # [num_layers, num_slots + 1, num_kv_heads, value_dim]
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # keys and values of each


class PagedKVManager:
    """The default `KVManager`, without prefix caching: each request computes all of its tokens.

    Slots of rejected draft tokens are overwritten by the request's next tokens; blocks that hold only such slots
    are freed.

    pool: the BlockPool that hands out blocks; None: a new one.
    """

    def __init__(self, context: KVContext, pool: BlockPool | None = None) -> None:
        self._pool = pool or BlockPool(context.num_blocks, context.block_size)
        self._device, self._compact = context.device, context.compact or compact
        self._tables = DeviceTables(self._pool, self._device)
        self._groups: list[_Group] = []
        self._num_final: dict[str, int] = {}  # slots of each request

    def add_group(self, layout: KVLayout, owner: str = TARGET, lookahead: int = 0) -> int:
        shape = layout.num_layers, self._pool.num_blocks * self._pool.block_size + 1, layout.num_kv_heads
        keys, values = (  # no slot is read before it is written
            torch.empty(*shape, width, dtype=layout.dtype, device=self._device)
            for width in (layout.key_dim, layout.value_dim)
        )
        self._groups.append(_Group(layout, keys, values, tuple(zip(keys, values, strict=True))))
        return len(self._groups) - 1

    def cache(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._groups[group].layers[layer]

    def admit(self, request_id: str, token_ids: np.ndarray, salt: str, groups: Sequence[int]) -> int:
        self._pool.add(request_id)
        self._num_final[request_id] = 0
        return 0

    def reserve(self, request_id: str, num_tokens: int, num_scratch: int) -> None:
        self._pool.grow(request_id, num_tokens + num_scratch)

    def metadata(self, request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> KVMetadata:
        ids, first, counts = list(request_ids), np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        for request_id, start, end in zip(ids, starts, (first + counts).tolist(), strict=True):
            # Past a request's own blocks, its table is padded with a block that another request may own.
            if end > (held := self._pool.num_slots(request_id)):
                raise CapacityError(
                    f"request {request_id!r} holds {held} KV slots, and a forward pass is to use the slots "
                    f"[{start}, {end}): from the root's slot on, a draft may use its plan's scratch_slots"
                )
        return KVMetadata(
            starts=tuple(starts),
            lengths=tuple(lengths),
            block_tables=self._tables.of(ids),
            slot_mapping=upload(self._pool.places(ids, first, counts), self._device),
            block_size=self._pool.block_size,
        )

    def compact(self, request_ids: Sequence[str], num_known: Sequence[int], verdict: Verdict) -> None:
        if verdict.rows.shape[1] > 1:
            first_nodes = [self._num_final[r] + known for r, known in zip(request_ids, num_known, strict=True)]
            self._move(list(request_ids), first_nodes, verdict)

    def fill(self, group: int, request_ids: Sequence[str], num_tokens: Sequence[int]) -> None:
        return

    def advance(self, requests: Sequence[RequestView], counts: Sequence[int]) -> None:
        for request, count in zip(requests, counts, strict=True):
            self._num_final[request.id] += count
            self._pool.shrink(request.id, self._num_final[request.id])

    def release(self, request_id: str) -> None:
        self._pool.drop(request_id)
        self._num_final.pop(request_id, None)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        assert all(request_id in self._pool for request_id in self._num_final)

    def _move(self, request_ids: list[str], first_nodes: list[int], verdict: Verdict) -> None:
        """Compact the KV cache after verification: move the keys and values of accepted draft tokens into consecutive
        slots, for all requests at once, in all layers that keep keys and values of draft tokens. The j-th accepted
        draft token of request i, counted from 1, goes to slot first_nodes[i] + j - 1 of the request.

        first_nodes: for each request, the slot of its first draft token.
        verdict: the result of verification, on the host.
        """
        rows = verdict.rows.numpy().astype(np.int64)
        steps = np.arange(rows.shape[1] - 1)  # j - 1
        nodes = rows[:, 1:] - rows[:, :1] - 1  # index within the request's tree
        of, step = ((steps < verdict.num_accepted.numpy()[:, None]) & (nodes != steps)).nonzero()
        if not len(of):
            return  # chains, or the first branch everywhere: every node is in its final slot already
        tables, size, first = self._pool.tables(request_ids), self._pool.block_size, np.array(first_nodes)[of]

        def slots(local: np.ndarray) -> torch.Tensor:
            return upload(tables[of, local // size] * size + local % size, self._device)

        source, destination = slots(first + nodes[of, step]), slots(first + step)
        for group in self._groups:
            if group.layout.keeps_nodes:
                self._compact(group.keys, group.values, source, destination)
