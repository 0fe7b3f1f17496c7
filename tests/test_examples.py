"""examples/: every file runs as it is."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import fastapi
import httpx
import pytest

from aserve.http import create_app

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


def test_every_example_is_tested_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"embed.py", "mount.py"}


@pytest.mark.e2e
def test_embed():
    done = subprocess.run(
        [sys.executable, "examples/embed.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert done.stderr == ""
    assert len([line for line in done.stdout.splitlines() if line]) >= 3


async def check_mounted(app) -> None:
    """The API answers under /llm while the application's lifespan lasts, and is closed afterwards."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        async with app.router.lifespan_context(app):
            assert (await client.get("/")).text
            assert (await client.get("/llm/ready")).json() == {"status": "ready"}
            assert [model["id"] for model in (await client.get("/llm/v1/models")).json()["data"]] == ["demo"]
            whole = await client.post("/llm/v1/chat/completions", json=HELLO)
            answer = whole.json()["choices"][0]["message"]["content"]
            assert answer
            stream = await client.post("/llm/v1/chat/completions", json={**HELLO, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert (await client.post("/llm/v1/completions", json={})).json()["error"]["param"] == "prompt"
        assert (await client.get("/llm/health")).status_code == 503


async def test_mount():
    await check_mounted(runpy.run_path(str(ROOT / "examples" / "mount.py"))["app"])


async def test_mount_in_fastapi():
    example = runpy.run_path(str(ROOT / "examples" / "mount.py"))
    app = fastapi.FastAPI(lifespan=example["lifespan"])

    @app.get("/")
    def home() -> str:
        return "home"

    app.mount("/llm", create_app(example["engine"]))
    await check_mounted(app)
