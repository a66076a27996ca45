"""How many KV blocks there is room for."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from specdec_core.config import EngineConfig
from specdec_core.errors import CapacityError
from specdec_core.types import KVLayout

FRACTION_OF_CPU_MEMORY = 0.25
FRACTION_OF_GPU_MEMORY = 0.9
UNKNOWN_MEMORY_BYTES = 2**31  # for the KV cache, where the system does not say how much is free


def num_kv_blocks(
    config: EngineConfig, layouts: Sequence[KVLayout], weight_bytes: int, max_model_len: int, device: torch.device
) -> int:
    """config.num_kv_blocks if given; else as many as the free memory holds and the largest batch could use.

    weight_bytes: of a draft model, which is yet to be loaded.

    Raises CapacityError if not even one request of max_model_len tokens fits.
    """
    needed = -(-max_model_len // config.block_size)
    bytes_per_block = config.block_size * sum(layout.bytes_per_token for layout in layouts)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        usable_bytes = _bytes_to_use(config.gpu_memory_utilization, device) - weight_bytes
        num_blocks = min(needed * config.max_num_seqs, usable_bytes // bytes_per_block)
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
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return UNKNOWN_MEMORY_BYTES
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * (fraction or FRACTION_OF_CPU_MEMORY))
