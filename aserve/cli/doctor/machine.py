"""The machine, as far as a plan needs to know it: memory, how fast it is read, a GPU, and which kernels will serve."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aserve.core.config import GiB
from aserve.kernels.native.library import NativeUnavailableError, find, find_compiler, own_variant
from aserve.runner.host_budget import host_memory_bytes

if TYPE_CHECKING:
    import torch

PROBE_BYTES: Final = 256 * 2**20
PROBE_S: Final = 0.4
"""For which memory is read over and over; with what comes before, a measurement takes less than a second."""
CGROUP: Final = Path("/sys/fs/cgroup")
MEMINFO: Final = Path("/proc/meminfo")


class Kernels(msgspec.Struct, frozen=True):
    """What computes on a CPU. kind: native, to_compile or torch. detail: the variant, or why there is none."""

    kind: str
    detail: str


def cpu_kernels() -> Kernels:
    """Which kernels a server would take, without compiling any."""
    try:
        variant = own_variant()
        if find(variant) is not None:
            return Kernels("native", variant)
        find_compiler()
    except NativeUnavailableError as reason:
        return Kernels("torch", str(reason))
    return Kernels("to_compile", variant)


def free_memory_bytes() -> int:
    """Host memory that a process may still take, its container's limit included."""
    free = host_memory_bytes()
    for line in _lines(MEMINFO):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = "".join(_lines(CGROUP / "memory.max"))
    used = "".join(_lines(CGROUP / "memory.current"))
    return max(0, min(free, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else free


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_bytes_per_s(device: "torch.device") -> float:
    """How fast a device reads its memory: the best of the sums over a piece of it that no cache holds."""
    import torch

    num_bytes = PROBE_BYTES if device.type != "cpu" else min(PROBE_BYTES, max(2**24, free_memory_bytes() // 8))
    x = torch.ones(num_bytes // 4, device=device)
    best_s, end_s = float("inf"), time.perf_counter() + PROBE_S
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        x.sum().item()
        best_s = min(best_s, time.perf_counter() - start_s)
    return num_bytes / best_s


def gpu_memory(device: "torch.device") -> tuple[int, int]:
    """Free and whole, in bytes."""
    import torch

    return torch.cuda.mem_get_info(device)


def size(num_bytes: float) -> str:
    """For people: 1.2 GiB, 12.3 MiB, 3.0 KiB."""
    for unit, bound in (("GiB", GiB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= bound:
            return f"{num_bytes / bound:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
