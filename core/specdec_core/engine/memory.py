"""How many KV blocks there is room for."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from specdec_core.config import FRACTION_OF_CPU_MEMORY, FRACTION_OF_GPU_MEMORY, EngineConfig
from specdec_core.errors import CapacityError
from specdec_core.types import KVLayout


def num_kv_blocks(config: EngineConfig, layouts: Sequence[KVLayout], max_model_len: int, device: torch.device) -> int:
    """config.num_kv_blocks if given; else as many as the free memory holds and the largest batch could use.

    Raises CapacityError if not even one request of max_model_len tokens fits.
    """
    needed = -(-max_model_len // config.block_size)
    bytes_per_block = config.block_size * sum(layout.bytes_per_token for layout in layouts)
    free_bytes = _bytes_to_use(config.gpu_memory_utilization, device)
    num_blocks = config.num_kv_blocks or min(needed * config.max_num_seqs, free_bytes // bytes_per_block)
    if num_blocks < needed:
        raise CapacityError(
            f"{num_blocks} KV blocks of {config.block_size} tokens ({bytes_per_block} bytes each) do not hold one "
            f"request of max_model_len={max_model_len} tokens, which needs {needed}: lower max_model_len, or raise "
            f"num_kv_blocks or gpu_memory_utilization"
        )
    return num_blocks


def _bytes_to_use(fraction: float | None, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - (fraction or FRACTION_OF_GPU_MEMORY)) * total)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * (fraction or FRACTION_OF_CPU_MEMORY))
