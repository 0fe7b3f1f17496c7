"""`python -m aserve` in a process of its own, and what a test may ask of it. Waits by reading, never asleep."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HELD = ("aserve_kv_cache_usage_ratio", "aserve_num_requests_running", "aserve_num_requests_waiting")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aserve", *arguments]


def question(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}


class ServerProcess:
    """A server that has begun to listen, its URL, and the lines that it printed."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self.launched_s = time.monotonic()
        self.popen = subprocess.Popen(
            command(*arguments), cwd=ROOT, env=os.environ | environ, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.url = self.line_with("listening on").rpartition(" ")[2]
        self.http = httpx.Client(base_url=self.url, timeout=30.0)

    def line_with(self, text: str) -> str:
        """Read what the server prints, up to a line with `text`."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line.rstrip())
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"the server ended without saying {text!r}: {self.lines}")

    def wait_until_ready(self) -> Self:
        self.line_with("curl -N")
        return self

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def wait_until_some_run_and_some_wait(self, within_s: float = 60.0) -> None:
        """Asks for no exact numbers: with little memory they change at every step, by preemption."""
        deadline = time.monotonic() + within_s
        while not all(self.metric(f"aserve_num_requests_{state}") for state in ("running", "waiting")):
            assert time.monotonic() < deadline

    def wait_until_idle(self, within_s: float = 60.0) -> None:
        """Until nothing runs, nothing waits, and no block is in use."""
        deadline = time.monotonic() + within_s
        while any(found := {name: self.metric(name) for name in HELD}.values()):
            assert time.monotonic() < deadline, found

    @contextmanager
    def stream(self, body: dict[str, Any], path: str = CHAT) -> Generator[httpx.Response]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            yield response

    def close(self) -> None:
        """Kill what still runs; a test that cares how it ends has seen to that before."""
        self.http.close()
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


@contextmanager
def serving(*arguments: str, port: int = 0, **environ: str) -> Generator[ServerProcess]:
    """A server on a CPU, at a free port."""
    server = ServerProcess("--port", str(port), "--device", "cpu", *arguments, **environ)
    try:
        yield server
    finally:
        server.close()


def run_to_the_end(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
    )


def deltas(lines: Any) -> Generator[dict[str, Any]]:
    """The first choice of each event of a stream, which must have its proper end."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    yield from (choice for event in events for choice in json.loads(event)["choices"])
