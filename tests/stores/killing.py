"""Processes of a test's own that say what is kept, and are killed while they go on: `kill -9` at some moment."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def said_before_kill(module: str, *arguments: object, after_s: float) -> list[str]:
    """The whole lines of `python -m module`, killed so long after its first."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        time.sleep(after_s)
        process.kill()
        said += process.stdout.readlines()
    return [line.strip() for line in said if line.endswith("\n")]  # it may be killed while it says so
