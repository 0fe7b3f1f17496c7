"""How much of the host's memory the KV cache may take on a CPU. Loads no torch."""

import os
from typing import Final

from aserve.core.config import GiB

CPU_BUDGET_BYTES: Final = 4 * GiB


def cpu_kv_budget() -> int:
    """Bytes: 4 GiB, or a quarter of a smaller memory. Pages are taken as they are used, so the price is paid late.

    On Windows, which takes them at once and does not tell Python how large the memory is, 1 GiB.
    """
    return min(CPU_BUDGET_BYTES, host_memory_bytes() // 4)


def host_memory_bytes() -> int:
    """Of the machine, used or not; 4 GiB where Python is not told."""
    if not hasattr(os, "sysconf"):
        return CPU_BUDGET_BYTES
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
