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
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from aserve.http.app import body_limit
from aserve.http.body import MAX_STRINGS
from aserve.http.middleware import MAX_BODY_BYTES
from aserve.http.openai.chat import ChatFields
from aserve.http.openai.completions import CompletionFields
from aserve.http.openai.tokenize import DetokenizeFields, TokenizeFields

ROUTES = {
    "/v1/chat/completions": (ChatFields, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "/v1/completions": (CompletionFields, {"prompt": "hi", "max_tokens": 1}),
    "/tokenize": (TokenizeFields, {"prompt": "hi"}),
    "/detokenize": (DetokenizeFields, {"tokens": [1]}),
}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CONTENT = b'{"messages":[{"role":"user","content":%b}]}'
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
MAX_BYTES = 32 * 2**20
MAX_BYTES_PER_BYTE = 20
ADDRESS_SPACE = 6 * 2**30
NUM_TRIES = 12


def listed(item, times):
    return b",".join([item] * times)


def messages(times, size, last=b""):
    """That many of them in about `size` bytes, and perhaps one more."""
    return b"[%b%b]" % (listed(b'{"role":"user","content":"%b"}' % (b"a" * max(size // times - 30, 0)), times), last)


def keys(times):
    return b"{%b}" % b",".join(b'"%07d":1' % number for number in range(times))


TEXTS = {
    "plain": b"a",
    "quotes": b'\\"',
    "backslashes": b"\\\\",
    "escapes": b"\\u4f60",
    "wide": "\u4f60".encode(),
    "spaces": b" ",
    "colons": b":",
    "commas": b",",
    "brackets": b"[",
}
LISTS = {
    "ids": b"15164",
    "ones": b"1",
    "spaced": b"1 ",
    "reals": b"1.5",
    "long": b"1" * 4000,
    "strings": b'"a"',
    "empty": b"[]",
}
ONE_PROMPT = b"[%b]" % listed(b"1", 1000)
LARGE = {
    "many messages": lambda n: (CHAT, b'{"messages":%b}' % messages(2000, n)),
    "too many messages": lambda n: (CHAT, b'{"messages":%b}' % messages(15_000, n)),
    "many messages, and a bad one": lambda n: (CHAT, b'{"messages":%b}' % messages(2000, n, b',{"role":"user","x":1}')),
    "many messages, and too hot": lambda n: (CHAT, b'{"temperature":7,"messages":%b}' % messages(2000, n)),
    "many messages to tokenize": lambda n: ("/tokenize", b'{"messages":%b}' % messages(2000, max(n, 2_000_000))),
    "many parts": lambda n: (
        CHAT,
        CONTENT % (b"[%b]" % listed(b'{"type":"text","text":"%b"}' % (b"a" * (n // 16_000)), 16_000)),
    ),
    "many parts of no kind": lambda n: (
        CHAT,
        CONTENT % (b"[%b]" % listed(b'{"type":"x","a":"%b"}' % (b"a" * (n // 16_000)), 16_000)),
    ),
    "numbers for parts": lambda n: (CHAT, CONTENT % (b"[%b]" % listed(b"1", min(n // 2, 1_100_000)))),
    "a part with many keys": lambda _: (CHAT, CONTENT % (b"[%b]" % keys(MAX_STRINGS - 500))),
    "template variables": lambda _: (CHAT, b'{"messages":[],"chat_template_kwargs":%b}' % keys(MAX_STRINGS - 500)),
    "biases": lambda _: (CHAT, b'{"messages":[],"logit_bias":%b}' % keys(MAX_STRINGS - 500)),
    "allowed tokens": lambda _: (TEXT, b'{"prompt":"a","allowed_token_ids":[%b]}' % listed(b"1", 1_000_000)),
    "more allowed tokens": lambda _: (TEXT, b'{"prompt":"a","allowed_token_ids":[%b]}' % listed(b"100000", 290_000)),
    "prompts, and too hot": lambda _: (TEXT, b'{"temperature":7,"prompt":[%b]}' % listed(ONE_PROMPT, 260)),
    "prompts, and a bad id": lambda _: (TEXT, b'{"prompt":[%b,[99999999]]}' % listed(ONE_PROMPT, 260)),
    "prompts, and a text": lambda _: (TEXT, b'{"prompt":[%b,"a"]}' % listed(ONE_PROMPT, 1000)),
    "prompts that are too long": lambda n: (TEXT, b'{"prompt":[%b]}' % listed(b'"%b"' % (b"a" * (n // 100)), 100)),
    "fields": lambda n: (TEXT, b"{%b}" % listed(b'"a":1', n // 6)),
    "an unknown field": lambda n: (TEXT, b'{"prompt":"a","x":"%b"}' % (b"a" * n)),
    "depth": lambda n: (TEXT, b'{"prompt":%b%b}' % (b"[" * (n // 2), b"]" * (n // 2))),
    "blanks": lambda n: (TEXT, b"{%b}" % (b" " * n)),
    "no end": lambda n: (TEXT, b'{"prompt":"%b' % (b"a" * n)),
    "not UTF-8": lambda n: (TEXT, b'{"prompt":"%b\xff"}' % (b"a" * n)),
    "no JSON": lambda n: (TEXT, b"\0" * n),
    **{
        f"{name} as a prompt": lambda n, text=text: (TEXT, b'{"prompt":"%b"}' % (text * (n // len(text))))
        for name, text in TEXTS.items()
    },
    **{
        f"{name} as a message": lambda n, text=text: (CHAT, CONTENT % (b'"%b"' % (text * (n // len(text)))))
        for name, text in TEXTS.items()
    },
    **{
        f"a list of {name}": lambda n, item=item: (
            TEXT,
            b'{"prompt":[%b]}' % listed(item, max(2048, n // (len(item) + 1))),
        )
        for name, item in LISTS.items()
    },
}
"""Bodies of about n bytes, by what is in them: refused for their length, for how much they hold, or only after all."""


def bodies(fields, base, values):
    """Of each field with each of the values, which come as JSON: a long one is not written for every field."""
    for name in fields.__struct_fields__:
        others = {other: value for other, value in base.items() if other != name}
        head = json.dumps(others or {"model": None})
        for value in values:
            yield name, f'{head[:-1]}, "{name}": '.encode() + value + b"}"


def check(response, name, *, is_over_limit):
    """Answered, or refused with an error that names the field. is_over_limit: the body is longer than any may be."""
    if response.status_code == 200:
        return False
    error = response.json()["error"]
    assert response.status_code in (400, 404) or (response.status_code == 413 and is_over_limit), (name, response.text)
    assert set(error) == {"message", "type", "param", "code"}, name
    assert 0 < len(error["message"]) <= 300, name
    is_whole_body = error["param"] is None and any(
        word in error["message"] for word in ("the body", "JSON", "the request body")
    )
    also = {"max_tokens": "min_tokens", "min_tokens": "max_tokens", "best_of": "n", "n": "best_of"}
    named = {name, also.get(name), "prompt" if name == "messages" else None}
    if name == "truncate_prompt_tokens":
        named |= {"prompt", "messages"}  # of which it leaves nothing
    assert not is_over_limit or response.status_code == 413, (name, error)
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


@asynccontextmanager
async def served(max_body_bytes=None):
    """A client of a server with little memory. max_body_bytes: instead of what the context allows."""
    from aserve import AsyncEngine
    from aserve.http import create_app

    async with AsyncEngine(device="cpu", max_num_seqs=4) as engine:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        transport = httpx.ASGITransport(create_app(engine, max_body_bytes=max_body_bytes))
        async with httpx.AsyncClient(transport=transport, base_url="http://aserve", timeout=60) as client:
            await ask_all(client)
            yield client, max_body_bytes or body_limit(engine)()
            await ask_all(client)


async def ask_all(client):
    for url, (_, base) in ROUTES.items():
        assert (await client.post(url, json=base)).status_code == 200


async def measure_fields(values):
    """Of every field of the API with each of the values; prints how many were refused."""
    encoded = [json.dumps(value).encode() for value in values]
    num_refused = 0
    async with served() as (client, limit):
        for url, (fields, base) in ROUTES.items():
            for name, content in bodies(fields, base, encoded):
                num_refused += await refused(client, url, name, content, is_over_limit=len(content) > limit)
    print(num_refused)


async def measure_bodies(sizes):
    """Of every large body in each size, in bytes or as a share of the limit, up to which all are taken."""
    num_refused = 0
    async with served(max(sizes) if max(sizes) > 1 else None) as (client, limit):
        for size in sizes:
            for what, body in LARGE.items():
                num_bytes = size if size > 1 else int(size * limit)
                url, content = body(num_bytes - 1024)
                if len(content) <= limit:
                    num_refused += await refused(client, url, what, content, is_known=False)
    print(num_refused)


async def refused(client, url, name, content, *, is_over_limit=False, is_known=True):
    """Whether it was; what it cost is the least of some tries, since other processes are felt in this one's caches.

    is_known: `name` is the field that the error has to name.
    """
    for _ in range(NUM_TRIES):
        with Meter() as meter:
            response = await client.post(url, content=content, headers={"content-type": "application/json"})
        if is_known and not check(response, name, is_over_limit=is_over_limit):
            return 0
        assert is_known or response.status_code == 400, (name, response.text[:300])
        if meter.cpu_s <= MAX_CPU_S and meter.num_bytes <= MAX_BYTES + MAX_BYTES_PER_BYTE * len(content):
            return 1
    raise AssertionError((url, name, content[:60], len(content), meter.cpu_s, meter.num_bytes, response.text[:300]))


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


THOROUGH = pytest.mark.thorough


@pytest.mark.timing
@pytest.mark.torch
@pytest.mark.parametrize(
    "which", ["QUICK", pytest.param("SMALL", marks=THOROUGH), pytest.param("HEAVY", marks=THOROUGH)]
)
def test_a_refused_request_costs_little(which):
    assert run(which) > 100


@pytest.mark.timing
@pytest.mark.torch
@pytest.mark.parametrize("which", ["AT_THE_LIMIT", "AT_THE_LARGEST_LIMIT", pytest.param("BELOW", marks=THOROUGH)])
def test_a_large_body_that_is_refused_costs_little(which):
    """Catches work that grows with what is refused: at a small context's limit, at the largest, and below."""
    assert run(which) >= 40


MEASURES = {
    "QUICK": partial(measure_fields, QUICK),
    "SMALL": partial(measure_fields, SMALL),
    "HEAVY": partial(measure_fields, HEAVY),
    "AT_THE_LIMIT": partial(measure_bodies, [1]),
    "AT_THE_LARGEST_LIMIT": partial(measure_bodies, [MAX_BODY_BYTES]),
    "BELOW": partial(measure_bodies, [share / 8 for share in range(1, 9)]),
}

if __name__ == "__main__":
    asyncio.run(MEASURES[sys.argv[1]]())
