"""Software that others wrote, each in an environment of its own, against a server on the demonstration model.

requirements/NAME.txt --pip--> .clients/NAME-DIGEST/     programs/NAME.py URLS --> a line of JSON --> asserts
"""

import hashlib
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ROOT, ServerProcess

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server() -> Generator[ServerProcess]:
    started = ServerProcess("--model", "demo", "--port", "0").wait_until_ready()
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="session")
def embedder() -> Generator[ServerProcess]:
    """The same model, which makes vectors of 256 numbers."""
    started = ServerProcess("--model", "demo", "--runner", "pooling", "--port", "0").wait_until_ready()
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="session")
def run_client(server: ServerProcess) -> Callable[..., Any]:
    """Runs a program with what its requirements name, and gives back what it prints last.

    others: URLs that follow the server's on its command line.
    """

    def run(name: str, *others: str) -> Any:
        command = [environment(name), str(HERE / "programs" / f"{name}.py"), server.url, *others]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def environment(name: str) -> str:
    """The Python of an environment with those requirements, made when it is first asked for."""
    pins = HERE / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / ".clients" / f"{name}-{digest}"
    python = str(folder / "bin" / "python")
    is_whole = folder / ".whole"
    if not is_whole.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", str(pins)], check=True, timeout=280)
        is_whole.touch()
    return python
