"""What a refused request costs: every field of the API at, below and above its bounds, in a server that is a process.

The server (`python -m tests.http.test_cost_of_refusal`) has the demonstration model and little memory to give, is asked
through ASGI, and measures itself. Fields come from schema.py, so that new ones are tested without being listed here.
"""

import asyncio
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from aserve.http.openai.schema import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields

ROUTES = {
    "/v1/chat/completions": (ChatFields, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "/v1/completions": (CompletionFields, {"prompt": "hi", "max_tokens": 1}),
    "/tokenize": (TokenizeFields, {"prompt": "hi"}),
    "/detokenize": (DetokenizeFields, {"tokens": [1]}),
}
MILLION = 10**6
QUICK = [0, -1, 1, 2**31, 2**63, 1e30, float("nan"), None, "x", [1]]
SMALL = [
    *(2, 0.5, -0.5, 2.5, 20, 21, 100, 101, 128, 129, 2**31 - 1, 2**63 - 1, 10**30),
    *(True, "", {}, [], {"x": 1}, ["x"], [-1], [2**31], [[1]]),
]
HEAVY = [
    *([1] * MILLION, list(range(MILLION)), ["a"] * MILLION, [[]] * MILLION, [1e-300] * MILLION, "a" * MILLION),
    *({str(n): 1 for n in range(MILLION)}, "a" * 16_000_000, '"' * 4_000_000, " " * 10_500_000 + "a"),
]
MAX_CPU_S = 0.05
MAX_CPU_S_PER_BYTE = 12e-9
"""Beyond 4 MB: a body of 16 MB is received, searched and, if only its text is too long, decoded."""
MAX_BYTES = 32 * 2**20
MAX_BYTES_PER_BYTE = 20
ADDRESS_SPACE = 6 * 2**30


def bodies(fields, base, values):
    """Of each field with each of the values, which come as JSON: a long one is not written for every field."""
    for name in fields.__struct_fields__:
        others = {other: value for other, value in base.items() if other != name}
        head = json.dumps(others or {"model": None})
        for value in values:
            yield name, f'{head[:-1]}, "{name}": '.encode() + value + b"}"


def check(response, name):
    """Answered, or refused with an error that names the field."""
    if response.status_code == 200:
        return False
    error = response.json()["error"]
    assert response.status_code in (400, 404), (name, response.text)
    assert set(error) == {"message", "type", "param", "code"}, name
    assert 0 < len(error["message"]) <= 300, name
    is_whole_body = error["param"] is None and ("the body" in error["message"] or "JSON" in error["message"])
    also = {"max_tokens": "min_tokens", "min_tokens": "max_tokens", "best_of": "n", "n": "best_of"}
    named = {name, also.get(name), "prompt" if name == "messages" else None}
    if name == "truncate_prompt_tokens":
        named |= {"prompt", "messages"}  # of which it leaves nothing
    assert is_whole_body or error["param"] in named or name in error["message"], (name, error)
    return True


class Meter:
    """Of one request: processor seconds of this process, and how much more memory it had at its peak."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._start_bytes = self._status("VmRSS")
        self._start_s = time.process_time()
        return self

    def __exit__(self, *_):
        self.cpu_s = time.process_time() - self._start_s
        self.num_bytes = self._status("VmHWM") - self._start_bytes

    def _status(self, name):
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024


async def serve_and_measure(values, num_tries):
    from aserve import AsyncEngine
    from aserve.http import create_app

    encoded = [json.dumps(value).encode() for value in values]
    async with AsyncEngine(device="cpu", max_num_seqs=4) as engine:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://aserve", timeout=60) as client:
            for url, (_, base) in ROUTES.items():
                assert (await client.post(url, json=base)).status_code == 200
            num_refused = 0
            for url, (fields, base) in ROUTES.items():
                for name, content in bodies(fields, base, encoded):
                    num_refused += await refused(client, url, name, content, num_tries)
            for url, (_, base) in ROUTES.items():
                assert (await client.post(url, json=base)).status_code == 200
            print(num_refused)


async def refused(client, url, name, content, num_tries):
    """Whether it was; what it cost is the least of some tries, since other processes are felt in this one's caches."""
    for _ in range(num_tries):
        with Meter() as meter:
            response = await client.post(url, content=content, headers={"content-type": "application/json"})
        if not check(response, name):
            return 0
        if meter.cpu_s <= max(
            MAX_CPU_S, MAX_CPU_S_PER_BYTE * len(content)
        ) and meter.num_bytes <= MAX_BYTES + MAX_BYTES_PER_BYTE * len(content):
            return 1
    raise AssertionError((url, name, content[:60], len(content), meter.cpu_s, meter.num_bytes, response.text))


def run(which):
    done = subprocess.run(
        [sys.executable, "-m", "tests.http.test_cost_of_refusal", which],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)


@pytest.mark.timing
@pytest.mark.torch
@pytest.mark.parametrize(
    "which",
    ["QUICK", pytest.param("SMALL", marks=pytest.mark.thorough), pytest.param("HEAVY", marks=pytest.mark.thorough)],
)
def test_a_refused_request_costs_little(which):
    assert run(which) > 100


if __name__ == "__main__":
    asyncio.run(serve_and_measure(globals()[sys.argv[1]], num_tries=5))
