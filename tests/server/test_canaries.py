"""Nothing that is said between a client and the model is in a log, a metric or a file, whatever goes wrong with it.

A canary sits in every place where a client can put words, and in the answers; each request is one way through the
server. Its `X-Request-Id` alone is the client's to be seen.
"""

import asyncio
import dataclasses
import json
import logging
from pathlib import Path

import pytest

from aserve.engine import Engine
from aserve.http import create_app
from tests.engines import byte_tokenizer, says, scripted_engine, scripted_loader
from tests.fakes import FakeScript, ScriptedRunner
from tests.server.wire import Site, request, serving

CANARY = "Kanarienvogel"
KEY = f"Authorization: Bearer {CANARY}-key".encode()
JSON = b"Content-Type: application/json"
CHAT, TEXT = b"/v1/chat/completions", b"/v1/completions"


class Everything(logging.Handler):
    """Keeps all that is logged by anybody, with all that comes along."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        told = logging.Formatter().format(record)
        self.lines.append(f"{record.name}: {told} {record.__dict__}")


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture):
    """Every line of every logger, at every level."""
    everything, root, ours = Everything(), logging.getLogger(), logging.getLogger("aserve")
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "aserve")
    root.addHandler(everything)
    yield everything.lines
    root.removeHandler(everything)
    assert not ours.handlers


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the server runs, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def post(path: bytes, fields: object, *headers: bytes) -> bytes:
    return request(path, b"POST", KEY, JSON, *headers, body=json.dumps(fields).encode())


MESSAGES = {"messages": [{"role": "user", "content": f"{CANARY} prompt"}]}
PROMPT = {"prompt": f"{CANARY} prompt"}
WORDS = f"{CANARY} words"
BODIES = [
    (CHAT, MESSAGES),
    (CHAT, {**MESSAGES, "stream": True}),
    (CHAT, {**MESSAGES, "user": WORDS, "metadata": {WORDS: WORDS}, "stop": [WORDS], "cache_salt": WORDS}),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {WORDS: WORDS}}),
    (CHAT, {**MESSAGES, "tools": [{"type": WORDS}]}),
    (CHAT, {"messages": [{"role": WORDS, "content": WORDS}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": WORDS}}]}]}),
    (CHAT, {"messages": WORDS}),
    (TEXT, PROMPT),
    (TEXT, {**PROMPT, "stream": True, "echo": True}),
    (TEXT, {**PROMPT, "model": WORDS}),
    (TEXT, {**PROMPT, CANARY: WORDS}),
    (TEXT, {**PROMPT, "temperature": WORDS}),
    (TEXT, {**PROMPT, "logit_bias": {CANARY: 1}}),
    (TEXT, {**PROMPT, "bad_words": [WORDS]}),
    (TEXT, {**PROMPT, "request_id": f"{CANARY} with a space"}),
    (TEXT, {"prompt": WORDS * 100}),
    (TEXT, {"prompt": f"{CANARY} \ud800"}),
    (b"/tokenize", {**PROMPT, "return_token_strs": True}),
    (b"/detokenize", {"tokens": list(CANARY.encode())}),
    (b"/detokenize", {"tokens": CANARY}),
]
REQUESTS = [
    *(post(path, body) for path, body in BODIES),
    post(TEXT, PROMPT, f"X-{CANARY}: {CANARY}".encode(), f"User-Agent: {CANARY}".encode()),
    request(TEXT, b"POST", KEY, JSON, body=f'{{"prompt": "{CANARY}'.encode()),
    request(TEXT, b"POST", KEY, JSON, body=f'{{"prompt": {CANARY}}}'.encode()),
    request(TEXT, b"POST", KEY, f"Content-Type: {CANARY}".encode(), body=CANARY.encode()),
    request(TEXT, b"POST", b"Authorization: Bearer wrong-" + CANARY.encode(), JSON, body=b"{}"),
    request(f"/v1/{CANARY}".encode(), b"GET", KEY),
    request(f"/v1/models/{CANARY}".encode(), b"GET", KEY),
    request(f"/v1/models%2F{CANARY}".encode(), b"GET", KEY),
    request(f"http://{CANARY}/v1/models".encode(), b"GET", KEY),
    request(f"/v1/models?key={CANARY}".encode(), b"GET", KEY),
    request(f"/health?{CANARY}".encode()),
    request(b"/v1/models", CANARY.encode(), KEY),
    request(b"/v1/models", CANARY.upper().encode(), KEY),
    f"{CANARY}\r\n\r\n".encode(),
    f"GET /{CANARY} HTTP/1.1\r\nHost: {CANARY}/\r\n\r\n".encode(),
    f"GET /{CANARY} HTTP/1.1\r\nHost: x\r\n {CANARY}: {CANARY}\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: x\r\nX: {CANARY * 2000}\r\n\r\n".encode(),
    request(TEXT, b"POST", KEY, JSON, b"Transfer-Encoding: chunked") + f"{CANARY}\r\n".encode(),
]


class Refusing(ScriptedRunner):
    """Launches nothing, and says why in the words of the prompt."""

    def launch(self, plan):
        raise RuntimeError(f"cannot compute {CANARY}")


class Panicking:
    """A tokenizer that raises what it was asked for, as a library does."""

    def __init__(self) -> None:
        self._inner = byte_tokenizer()

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def encode(self, text: str, **_: object):
        raise RuntimeError(f"cannot split {text}")


def panicking_loader(report):
    return dataclasses.replace(scripted_loader()(report), tokenizer=Panicking())


async def ask_all(site: Site) -> list[int]:
    """Every request, each on a connection of its own, and one whose client leaves in the middle."""
    statuses = []
    for data in REQUESTS:
        client = await site.connect()
        answer = await client.ask(data)
        statuses.append(answer.status)
        await client.close()
    client = await site.connect()
    await client.send(post(TEXT, {**PROMPT, "stream": True, "ignore_eos": True}))
    client.reset()
    await site.quiet()
    return statuses


@pytest.mark.parametrize("fails", ["nothing", "steps", "tokenizer"])
@pytest.mark.usefixtures("empty_folder")
async def test_no_canary_in_any_log_or_metric_or_file(heard, capfd, fails: str):
    engine = {
        "nothing": lambda: scripted_engine(says(f"{CANARY} answer")),
        "steps": lambda: scripted_engine(runner=Refusing(model=FakeScript(b"a"))),
        "tokenizer": lambda: Engine(panicking_loader),
    }[fails]()
    asyncio.get_running_loop().set_debug(True)
    async with engine:
        async with serving(create_app(engine, api_keys=[f"{CANARY}-key"])) as site:
            statuses = await ask_all(site)
            metrics = await site.ask(request(b"/metrics"))
        assert {"nothing": 200, "steps": 500, "tokenizer": 500}[fails] in statuses
        assert {400, 401, 404, 431, 501} <= set(statuses)
        assert max(statuses) <= 501
    printed = capfd.readouterr()
    assert any("aserve.access" in line for line in heard)
    for sink in ("\n".join(heard), metrics.body.decode(), printed.out, printed.err):
        assert CANARY.lower() not in sink.lower()
