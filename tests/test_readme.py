"""README.md: what it shows runs exactly as it is written there, and what it points to exists."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server_process import deltas, serving

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PORT = 8000
SERVER = f"127.0.0.1:{PORT}"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


PYTHON_BLOCKS = blocks("python")
(CURL,) = (block for block in blocks("bash") if block.startswith("curl"))


@pytest.fixture(scope="module")
def server():
    """The server that the README's lines speak to, where its port is free."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"another server has port {PORT}")
    with serving(port=PORT) as server:
        yield server.wait_until_ready()


def run(*command: str) -> str:
    """What a command prints; it must succeed and complain of nothing."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_the_curl_line(server):
    choices = list(deltas(run("bash", "-c", CURL).splitlines()))
    assert choices[-1]["finish_reason"] == "stop"
    assert len(choices) > 5


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in PYTHON_BLOCKS if SERVER in block])
def test_what_asks_the_server(server, block):
    assert run(sys.executable, "-c", block).strip()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in PYTHON_BLOCKS if SERVER not in block])
def test_what_needs_no_server(block):
    assert run(sys.executable, "-c", block).strip()


def test_there_is_something_to_run():
    assert len(PYTHON_BLOCKS) >= 3
    assert any("AsyncEngine" in block for block in PYTHON_BLOCKS)
    assert any("LLM" in block for block in PYTHON_BLOCKS)
    assert any("openai" in block for block in PYTHON_BLOCKS)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
