"""Plans memory: how many bytes are needed and how many KV blocks fit, before anything is allocated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from attrs import frozen

from specdec_core.config.engine import EngineConfig
from specdec_core.contracts.proposer import Plan
from specdec_core.engine.step_memory import StepMemory
from specdec_core.errors import CapacityError, reason
from specdec_core.models.memory_errors import is_lack_of_memory
from specdec_core.models.meta_load import Outline

FRACTION_OF_CPU_MEMORY = 0.25
FRACTION_OF_GPU_MEMORY = 0.9

UNKNOWN_BYTES = 2**33  # assumed where the system does not say

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # within a container: its own, in version 2


@frozen(kw_only=True)
class MemoryPlan:
    """How an engine will use the device's memory, in bytes. Where num_ranks ranks share the model, all numbers are of
    one rank: on a CPU each has its share of the free memory.

    free_bytes: the device's free memory before the weights (`target_weight_bytes` and `draft_weight_bytes`) are loaded.
    state_bytes: of the recurrent layers' states, for max_num_seqs requests.
    kv_budget_bytes: the most memory that the KV cache may use after the weights are loaded.
    step: the largest step, for which a GPU must have room beside the KV cache.
    scratch_slots: the number of KV-cache slots per request that a proposer may overwrite while it drafts. The first is
        the slot of the root (the request's last token).
    limited_by: the reason why num_blocks is not larger.
    """

    free_bytes: int
    target_weight_bytes: int
    draft_weight_bytes: int
    state_bytes: int
    kv_budget_bytes: int
    step: StepMemory
    bytes_per_block: int  # in all groups
    draft_kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    limited_by: Literal["num_kv_blocks", "max_num_seqs", "memory"]
    max_model_len: int
    max_num_seqs: int
    scratch_slots: int
    num_ranks: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """How many tokens, of all requests together, fit into the KV cache."""
        return self.num_blocks * self.block_size

    @property
    def num_full_requests(self) -> int:
        """The number of requests of max_model_len tokens that can run at once without preemption."""
        return min(self.max_num_seqs, self.num_blocks // _blocks(self.max_model_len, self.block_size))

    @property
    def scratch_bytes(self) -> int:
        """The number of bytes in one request's scratch slots of the KV cache."""
        return self.scratch_slots * self.kv_bytes_per_token


def plan_memory(
    config: EngineConfig,
    target: Outline,
    plan: Plan,
    bytes_per_block: int,
    draft_kv_bytes: int = 0,
    num_speculative_tokens: int = 0,
) -> MemoryPlan:
    """Plan the KV cache: config.num_kv_blocks blocks if given, else as many as fit into free memory, but no more than
    the largest batch could use.

    target: the target model's structure and the size of its weights. Weights that are loaded already count as 0 bytes.
    plan: what all proposers together need from the engine.
    bytes_per_block: bytes of a block in all layer groups of the KV cache, computed by the KV manager.
    draft_kv_bytes: bytes per token in the KV cache of the draft models' own layers.
    num_speculative_tokens: the most draft tokens of a request in a step.

    Raises CapacityError if the weights or the blocks do not fit, or if the blocks do not hold one request of
    max_model_len tokens.
    """
    max_model_len, device = target.info.max_model_len, target.info.device
    num_ranks = config.tensor_parallel_size
    free_bytes, total_bytes = (each // (1 if device.type == "cuda" else num_ranks) for each in free_memory(device))
    states = target.kv_groups.states
    state_bytes = 0 if states is None else config.max_num_seqs * states.bytes_per_request
    left_bytes = free_bytes - target.weight_bytes - plan.weight_bytes - state_bytes
    step = StepMemory.of(target, config, num_speculative_tokens, len(plan.taps), plan.graph_bytes)
    kv_budget_bytes = _kv_budget(config.gpu_memory_utilization, left_bytes, total_bytes, step, device)
    # Nodes use slots of the request's later tokens; scratch may reach beyond the last of them.
    most = config.max_num_seqs * _blocks(max_model_len + max(0, plan.scratch_slots - 1), config.block_size)
    fitting = kv_budget_bytes // bytes_per_block
    memory = MemoryPlan(
        free_bytes=free_bytes,
        target_weight_bytes=target.weight_bytes,
        draft_weight_bytes=plan.weight_bytes,
        state_bytes=state_bytes,
        kv_budget_bytes=kv_budget_bytes,
        step=step,
        bytes_per_block=bytes_per_block,
        draft_kv_bytes_per_token=draft_kv_bytes,
        block_size=config.block_size,
        num_blocks=config.num_kv_blocks or min(most, fitting),
        limited_by="num_kv_blocks" if config.num_kv_blocks else "max_num_seqs" if most <= fitting else "memory",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        scratch_slots=plan.scratch_slots,
        num_ranks=num_ranks,
    )
    _check(memory, left_bytes, num_speculative_tokens, device)
    return memory


def _check(memory: MemoryPlan, left_bytes: int, num_speculative_tokens: int, device: torch.device) -> None:
    """Raise CapacityError if the plan does not fit. left_bytes: free memory after the weights are loaded and the states
    of recurrent layers are allocated."""
    if left_bytes < 0:
        parts = (
            ("target weights", memory.target_weight_bytes),
            ("draft weights", memory.draft_weight_bytes),
            (f"recurrent states for max_num_seqs={memory.max_num_seqs} requests", memory.state_bytes),
        )
        raise CapacityError(
            f"{' and '.join(f'{size} bytes of {what}' for what, size in parts if size)} do not fit into the "
            f"{memory.free_bytes} bytes of free memory: use "
            f"{'a smaller draft or none, ' if memory.draft_weight_bytes else ''}"
            f"{'a lower max_num_seqs, ' if memory.state_bytes else ''}a smaller model or another dtype, or free some"
        )
    step = memory.step
    if device.type == "cuda" and step.num_bytes > left_bytes:
        fewer = ", num_speculative_tokens" if num_speculative_tokens else ""
        raise CapacityError(
            f"the largest step takes about {step.num_bytes} bytes, for {step.num_tokens} tokens and {step.num_rows} "
            f"rows of logits, and the weights leave {left_bytes} of {memory.free_bytes} bytes free: lower "
            f"max_num_seqs, max_num_batched_tokens{fewer}, {_eager_part(step)}or use a smaller "
            f"model{' or draft' if fewer else ''}"
        )
    needed = _blocks(memory.max_model_len, memory.block_size)
    if memory.num_blocks < needed:
        lower = "block_size" if memory.block_size > memory.max_model_len else "max_model_len"
        raised = "num_kv_blocks" if memory.limited_by == "num_kv_blocks" else "gpu_memory_utilization"
        raise CapacityError(
            f"{memory.num_blocks} KV blocks of {memory.block_size} tokens ({memory.bytes_per_block} bytes each"
            f"{_draft_part(memory)}) do not hold one request of max_model_len={memory.max_model_len} tokens, which "
            f"needs {needed}: lower {lower}, or raise {raised}{_step_part(memory, device)}"
        )
    if memory.kv_bytes > left_bytes:
        raise CapacityError(
            f"num_kv_blocks={memory.num_blocks} blocks of {memory.bytes_per_block} bytes{_draft_part(memory)} do not "
            f"fit into the {left_bytes} bytes that the weights leave free: lower num_kv_blocks, or leave it out"
        )


@contextmanager
def explaining_lack_of_memory(memory: MemoryPlan, config: EngineConfig) -> Iterator[None]:
    """A context of the first steps. If a GPU's memory runs out there, an error says what to lower."""
    try:
        yield
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        fraction = config.gpu_memory_utilization or FRACTION_OF_GPU_MEMORY
        cache = f"num_kv_blocks={memory.num_blocks}" if config.num_kv_blocks else f"gpu_memory_utilization={fraction}"
        raise CapacityError(
            f"the device's memory ran out in the first steps, before any request, beside {memory.kv_bytes} bytes of KV "
            f"cache: lower {cache}, max_num_batched_tokens={config.max_num_batched_tokens} or "
            f"max_num_seqs={config.max_num_seqs}, {_eager_part(memory.step)}or free some ({reason(error)})"
        ) from error


def _step_part(memory: MemoryPlan, device: torch.device) -> str:
    """What else helps where the largest step takes room from the KV cache, for errors. Empty on a CPU."""
    if device.type != "cuda":
        return ""
    return f". The largest step takes about {memory.step.num_bytes} bytes: less with a lower max_num_seqs"


def _eager_part(step: StepMemory) -> str:
    """That CUDA graphs may be left out, for errors. Empty if there are none."""
    return f"set enforce_eager=True ({step.graph_bytes} bytes are for CUDA graphs), " if step.graph_bytes else ""


def _draft_part(memory: MemoryPlan) -> str:
    """What a draft has of each KV block, for errors. Empty if it has nothing."""
    num_bytes = memory.draft_kv_bytes_per_token * memory.block_size
    return f", {num_bytes} of them the draft's" if num_bytes else ""


def _kv_budget(
    fraction: float | None, left_bytes: int, total_bytes: int, step: StepMemory, device: torch.device
) -> int:
    """The most bytes that the KV cache may use. On a GPU: left_bytes - (1 - fraction) * total_bytes, which leaves room
    for the largest step and other uses, or less, where the step takes more than that. On a CPU, which other programs
    share: fraction * left_bytes.

    fraction: gpu_memory_utilization; None: the default.
    left_bytes: free memory after the weights are loaded.
    """
    if device.type == "cuda":
        room_bytes = max((1 - (fraction or FRACTION_OF_GPU_MEMORY)) * total_bytes, step.num_bytes)
        return max(0, int(left_bytes - room_bytes))
    return max(0, int(left_bytes * (fraction or FRACTION_OF_CPU_MEMORY)))


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device. On a CPU, free is the memory available without swapping, within the container's
    limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free, total = _system_memory()
    limit, used = _number(CGROUP / "memory.max", r"(\d+)"), _number(CGROUP / "memory.current", r"(\d+)")
    if limit is None or used is None:
        return free, total
    cached = _number(CGROUP / "memory.stat", r"inactive_file (\d+)") or 0
    return min(free, max(0, limit - used + cached)), min(total, limit)


def _system_memory() -> tuple[int, int]:
    available, total = (_number(MEMINFO, rf"{name}: +(\d+) kB") for name in ("MemAvailable", "MemTotal"))
    if available is not None and total is not None:
        return available * 1024, total * 1024
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total // 2, total
    return UNKNOWN_BYTES, UNKNOWN_BYTES


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) if match else None
