"""One benchmark result as one JSON line: what was measured, on which machine, from which commit."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, Final

VERSIONS_OF: Final = ("torch", "triton", "transformers")
ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """The processor, its cores and the versions that matter; the GPU too where torch was loaded and has one.

    stolen_percent: of the cores' time since the script started, what a hypervisor gave to others; None where none says.
    """
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),  # None leaves the number of threads to each engine
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS_OF},
        "stolen_percent": rounded(_stolen_percent()),
        **_gpu(),
    }


def version(package: str) -> str | None:
    """The installed version of a package, which is not imported for this; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The short hash of HEAD, with a + where the tree differs from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def emit(bench: str, config: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print the result line. Floats are rounded to four significant digits; one that is no number is null."""
    tidy = {name: rounded(value) for name, value in figures.items()}
    print(json.dumps({"bench": bench, **config, **tidy, "commit": commit(), "machine": machine()}), flush=True)


def rounded(value: Any) -> Any:
    """As it is written: a float with four significant digits, or None where it is no number; all else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _stolen_percent() -> float | None:
    stolen_s = _stolen_s()
    if stolen_s is None or _STARTED[1] is None:
        return None
    return 100 * (stolen_s - _STARTED[1]) / ((time.monotonic() - _STARTED[0]) * (os.cpu_count() or 1))


def _stolen_s() -> float | None:
    """Seconds of all cores together, since the machine started (Linux: proc(5), "steal")."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        return int(words[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


_STARTED: Final = time.monotonic(), _stolen_s()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _gpu() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # not loaded for this: a client's benchmark does without
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def median_error(values: Sequence[float]) -> float:
    """The standard error of their median, which is a quarter more than that of their mean."""
    return 1.25 * stdev(values) / math.sqrt(len(values))
