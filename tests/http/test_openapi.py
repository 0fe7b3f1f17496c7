"""/openapi.json: it is about the routes that there are, it says what is taken, and what it says is so."""

import asyncio
import json
import re
import sys
import threading
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from aserve.http import create_app
from aserve.http.openai.chat import ChatFields
from aserve.http.openai.completions import CompletionFields
from aserve.http.openapi import openapi
from tests.engines import scripted_engine
from tests.http.conftest import client_of
from tests.server.test_lifecycle import running

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance"
)

NUM_CASES = 20_000


def test_every_route_is_in_the_document_and_no_other():
    app = create_app(scripted_engine())
    methods = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert {(path, method) for path, item in openapi()["paths"].items() for method in item} == methods


@pytest.mark.parametrize("kind", [ChatFields, CompletionFields])
def test_every_field_is_in_its_schema(kind):
    shape = openapi()["components"]["schemas"][kind.__name__]
    assert shape["properties"].keys() >= set(kind.__struct_fields__)
    assert shape["required"] == [{"ChatFields": "messages", "CompletionFields": "prompt"}[kind.__name__]]
    assert not shape["additionalProperties"]


async def test_it_says_below_which_path_it_is_mounted():
    """Catches clients made from it that ask the application around."""
    engine = scripted_engine()
    async with client_of(Starlette(routes=[Mount("/llm", create_app(engine))])) as client:
        assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
    async with client_of(create_app(engine)) as client:
        assert "servers" not in (await client.get("/openapi.json")).json()


async def test_it_is_served_before_a_model_is_there():
    engine = scripted_engine()
    async with client_of(create_app(engine)) as client:
        assert json.loads((await client.get("/openapi.json")).content) == json.loads(json.dumps(openapi()))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
async def test_twenty_thousand_requests_from_the_document_find_no_5xx_and_leave_nothing_behind(tmp_path, caplog):
    """By schemathesis, over a real socket: bodies that fit the document and that do not, wrong methods and types.

    A deadline of a microsecond may be over before the request is served: that 503 is the right answer, and no other is.
    """
    (tmp_path / "schemathesis.toml").write_text(
        "[checks.not_a_server_error]\nexpected-statuses = ['2xx', '4xx', 503]\n"
    )
    operations = [operation for item in openapi()["paths"].values() for operation in item.values()]
    num_with_input = sum("requestBody" in operation or bool(operation.get("parameters")) for operation in operations)
    engine = scripted_engine()
    async with running(engine) as run:
        url = f"http://127.0.0.1:{run.port}"
        before = held()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", CHECKS]
        command += [
            "--max-examples",
            str(NUM_CASES // num_with_input),
            "--phases",
            "examples,coverage,fuzzing",
            "--continue-on-failure",
        ]
        command += ["--exclude-path", "/v1/inspect/events"]  # it never ends
        command += ["--no-color", "--seed", "1", "--generation-database", "none", "--suppress-health-check", "all"]
        report = tmp_path / "report.txt"
        with report.open("wb") as out:
            process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, cwd=tmp_path)
            code = await process.wait()
        said = report.read_text()
        print(said[-2000:])
        assert code == 0, said[-6000:]
        unavailable = [line for line in caplog.messages if " 503 " in line]
        assert all("error=queue_timeout" in line for line in unavailable), unavailable
        num_cases = int(re.search(r"(\d+) generated", said)[1])
        assert num_cases >= NUM_CASES
        await asyncio.sleep(1.0)
        after = held()
        print({"before": before, "after": after})
        assert engine.statistics().num_used_blocks == engine.statistics().num_running == 0
        assert after["tasks"] <= before["tasks"] + 1
        assert after["threads"] <= before["threads"] + 40  # of pools, which keep theirs
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["resident_kib"] <= before["resident_kib"] + 32 * 1024


def held() -> dict[str, int]:
    """What a process has that it should give back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "resident_kib": int(status["VmRSS"].split()[0]),
    }
