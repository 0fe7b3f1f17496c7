"""The first stage of gpu_check.sh: torch and triton can be imported, and the device computes. Prints a JSON line.

Reading torch's libraries from a cold disk can take a minute; afterwards they are in memory, and no other stage pays.

    python scripts/gpu_device.py cuda|cpu
"""

import sys
import time

from report import emit


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
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
    figures = {"import_s": imported_s - begin_s, "first_use_s": first_use_s, "memory_gib": gib}
    emit("device", {"device": device.type, "triton": triton.__version__}, figures)


if __name__ == "__main__":
    main()
