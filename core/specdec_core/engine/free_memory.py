"""How much memory a device has left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

UNKNOWN_BYTES = 2**33  # assumed where the system does not say

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # within a container: its own, in version 2


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes. On a CPU, free is what could be had without swapping, and a container's limit counts."""
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
