"""The real command in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def environment(**variables: str) -> dict[str, str]:
    """The process's own, without what would change how aserve runs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASERVE_", "OPENAI_", "XDG_"))}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables}


def aserve(*words: str, stdin: str = "", timeout: float = 120.0, **variables: str) -> Done:
    """Run `aserve` to its end."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "aserve", *words],
        input=stdin,
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)


def modules_after(*words: str, stdin: str = "") -> tuple[int, set[str]]:
    """The exit status of a command, and which top-level modules it imported."""
    program = (
        "import sys\nfrom aserve.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code or 0\n"
        "sys.stderr.write('\\nMODULES ' + ' '.join({name.split('.')[0] for name in sys.modules}))\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        input=stdin,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, set(done.stderr.rpartition("MODULES ")[2].split())
