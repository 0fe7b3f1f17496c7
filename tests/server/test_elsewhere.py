"""What holds where there is no Triton, no uvloop and less of Unix: see elsewhere.py, and docs/install.md."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.doc_pages import Server

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("elsewhere.py")
QUESTION = {"messages": [{"role": "user", "content": "What is aserve?"}], "temperature": 0}

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.torch]


@pytest.mark.parametrize("system", [pytest.param("macos", marks=pytest.mark.thorough), "windows"])
def test_the_demo_is_served_and_ends_at_ctrl_c(system):
    """Catches what only Linux has, wherever it is imported or called between the start and the end."""
    words = [sys.executable, str(PROGRAM), system, "serve", "demo", "--shutdown-timeout", "5"]
    with closing(Server(words, ROOT, os.environ | {"PYTHONPATH": str(ROOT)})) as server:
        assert any("CPU kernels: torch's" in line for line in server.lines), server.lines
        url = f"http://{server.address}/v1/chat/completions"
        whole = httpx.post(url, json=QUESTION, timeout=60).json()
        assert whole["choices"][0]["message"]["content"]
        streamed = httpx.post(url, json={**QUESTION, "stream": True}, timeout=60)
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_an_engine_is_embedded():
    """In the thread of an event loop that is asyncio's own."""
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import elsewhere; elsewhere.become('windows')\n"
        "from aserve import LLM, SamplingParams\n"
        "with LLM('demo') as llm:\n"
        "    print(llm.generate('Once upon a time', SamplingParams(max_tokens=8))[0].text)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_gpu_without_triton_is_told_what_to_install():
    program = (
        "import sys; sys.modules['triton'] = None\n"  # as Python marks what cannot be imported
        "import torch\n"
        "from aserve.kernels.dispatch import select_ops\n"
        "select_ops(torch.device('cuda'))\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert "ConfigError: device cuda needs Triton, which is not installed: pip install triton" in done.stderr
