"""examples/: every file runs as it is."""

import ast
import os
import re
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
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"embed.py", "mount.py", "structured.py"}


def lines_of(example: str) -> list[str]:
    """What a program prints, which must not complain."""
    done = subprocess.run(
        [sys.executable, f"examples/{example}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.e2e
def test_embed():
    assert len(lines_of("embed.py")) >= 3


@pytest.mark.e2e
def test_structured():
    person, answer, code = lines_of("structured.py")
    assert set(ast.literal_eval(person)) == {"name", "age", "born"}
    assert answer in ("yes", "no")
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", code)


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
