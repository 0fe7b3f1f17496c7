"""The first stage of gpu_check.sh: torch and triton can be imported, and the device computes. Prints a JSON line.

Fails where others hold a tenth of the device's memory: a server that an earlier run left behind, say. Reading torch's
libraries from a cold disk can take a minute; afterwards they are in memory, and no other stage pays.

    python scripts/gpu_device.py cuda|cpu
"""

import sys
import time
from typing import Final

from report import emit

MOST_HELD: Final = 0.1
"""Of the device's memory, by others. Models that fill it would fail one after another."""


def main() -> None:
    begin_s = time.perf_counter()
    import torch
    import triton

    imported_s = time.perf_counter()
    device = torch.device(sys.argv[1])
    two = int(torch.ones(2, device=device).sum())
    first_use_s = time.perf_counter() - imported_s
    if two != 2:
        raise SystemExit(f"{device} adds 1 and 1 to {two}")
    gib = None
    if device.type == "cuda":
        free_gib, gib = (num_bytes / 2**30 for num_bytes in torch.cuda.mem_get_info(device))
        if free_gib < (1 - MOST_HELD) * gib:
            raise SystemExit(f"{free_gib:.1f} of {gib:.1f} GiB are free: end what holds the others (nvidia-smi)")
    figures = {"import_s": imported_s - begin_s, "first_use_s": first_use_s, "memory_gib": gib}
    emit("device", {"device": device.type, "triton": triton.__version__}, figures)


if __name__ == "__main__":
    main()
