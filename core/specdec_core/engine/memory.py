"""What memory is needed, and how many KV blocks there is room for: planned before anything is allocated."""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen

from specdec_core.config import EngineConfig
from specdec_core.engine.free_memory import free_memory
from specdec_core.errors import CapacityError
from specdec_core.types import KVLayout, Plan

FRACTION_OF_CPU_MEMORY = 0.25
FRACTION_OF_GPU_MEMORY = 0.9


@frozen(kw_only=True)
class MemoryPlan:
    """The memory of one engine, in bytes, and what it holds.

    free_bytes: of the device, before the weights that are yet to be loaded (`target_weight_bytes` and
    `draft_weight_bytes`) are. kv_budget_bytes: what the KV cache may take of what is left then. scratch_slots: draft KV
    slots per request, counted from the root's. limited_by: why there are no more blocks.
    """

    free_bytes: int
    target_weight_bytes: int
    draft_weight_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int  # a part of kv_bytes_per_token
    block_size: int
    num_blocks: int
    limited_by: Literal["num_kv_blocks", "max_num_seqs", "memory"]
    max_model_len: int
    max_num_seqs: int
    scratch_slots: int

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, of all requests together."""
        return self.num_blocks * self.block_size

    @property
    def num_full_requests(self) -> int:
        """Requests of max_model_len tokens that run at once, none of them preempted."""
        return min(self.max_num_seqs, self.num_blocks // _blocks(self.max_model_len, self.block_size))

    @property
    def scratch_bytes(self) -> int:
        """Of one request, at most."""
        return self.scratch_slots * self.kv_bytes_per_token


def plan_memory(
    config: EngineConfig,
    target_layout: KVLayout,
    plan: Plan,
    *,
    max_model_len: int,
    device: torch.device,
    target_weight_bytes: int = 0,
) -> MemoryPlan:
    """config.num_kv_blocks if given; else as many blocks as the free memory holds and the largest batch could use.

    plan: the proposer's, whose weights are yet to be loaded. target_weight_bytes: of a target that is, too.

    Raises CapacityError if the weights or the blocks do not fit, or not even one request of max_model_len tokens does.
    """
    free_bytes, total_bytes = free_memory(device)
    left_bytes = free_bytes - target_weight_bytes - plan.weight_bytes
    kv_budget_bytes = _kv_budget(config.gpu_memory_utilization, left_bytes, total_bytes, device)
    draft_kv_bytes = plan.kv_layout.bytes_per_token if plan.kv_layout is not None else 0
    bytes_per_block = config.block_size * (target_layout.bytes_per_token + draft_kv_bytes)
    # Nodes stand where the request's own tokens will, scratch may reach beyond the last of them.
    most = config.max_num_seqs * _blocks(max_model_len + max(0, plan.scratch_slots - 1), config.block_size)
    fitting = kv_budget_bytes // bytes_per_block
    memory = MemoryPlan(
        free_bytes=free_bytes,
        target_weight_bytes=target_weight_bytes,
        draft_weight_bytes=plan.weight_bytes,
        kv_budget_bytes=kv_budget_bytes,
        kv_bytes_per_token=target_layout.bytes_per_token + draft_kv_bytes,
        draft_kv_bytes_per_token=draft_kv_bytes,
        block_size=config.block_size,
        num_blocks=config.num_kv_blocks or min(most, fitting),
        limited_by="num_kv_blocks" if config.num_kv_blocks else "max_num_seqs" if most <= fitting else "memory",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        scratch_slots=plan.scratch_slots,
    )
    _check(memory, left_bytes)
    return memory


def _check(memory: MemoryPlan, left_bytes: int) -> None:
    """left_bytes: what is free once the weights are loaded."""
    if left_bytes < 0:
        weights = " and ".join(
            f"{size} bytes of {whose} weights"
            for whose, size in (("target", memory.target_weight_bytes), ("draft", memory.draft_weight_bytes))
            if size
        )
        raise CapacityError(
            f"{weights} do not fit into the {memory.free_bytes} bytes of free memory: use a smaller model or another "
            f"dtype, or free some"
        )
    needed = _blocks(memory.max_model_len, memory.block_size)
    if memory.num_blocks < needed:
        lower = "block_size" if memory.block_size > memory.max_model_len else "max_model_len"
        raise CapacityError(
            f"{memory.num_blocks} KV blocks of {memory.block_size} tokens ({memory.bytes_per_block} bytes each) do not "
            f"hold one request of max_model_len={memory.max_model_len} tokens, which needs {needed}: lower "
            f"{lower}, or raise "
            f"{'num_kv_blocks' if memory.limited_by == 'num_kv_blocks' else 'gpu_memory_utilization'}"
        )
    if memory.kv_bytes > left_bytes:
        raise CapacityError(
            f"num_kv_blocks={memory.num_blocks} blocks of {memory.bytes_per_block} bytes do not fit into the "
            f"{left_bytes} bytes that the weights leave free: lower num_kv_blocks, or leave it out"
        )


def _kv_budget(fraction: float | None, left_bytes: int, total_bytes: int, device: torch.device) -> int:
    """What the KV cache may take of what the weights leave: on a GPU all but a part of the whole memory, which is for
    activations and others; on a CPU, which other programs share, a part of what is free."""
    if device.type == "cuda":
        return max(0, int(left_bytes - (1 - (fraction or FRACTION_OF_GPU_MEMORY)) * total_bytes))
    return max(0, int(left_bytes * (fraction or FRACTION_OF_CPU_MEMORY)))


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
