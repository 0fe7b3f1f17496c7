"""What a request says is never run, unpickled, fetched, loaded or written: Python's own audit hooks look on.

Every request is asked twice, since the first of its kind may import modules, which are run, of course. Then an event
that no request has any business with is told of, with what it was about.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aserve.http import create_app
from tests.http.test_tools import speaking
from tests.server.test_canaries import CANARY, KEY, REQUESTS, post
from tests.server.wire import Site, request, serving

NOBODYS = (
    *("exec", "compile", "code.__new__", "import", "marshal.loads", "pickle.find_class", "ctypes.dlopen"),
    *("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil."),
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.", "pty.spawn"),
    *("socket.getaddrinfo", "socket.gethostby", "socket.sendto", "socket.sendmsg", "urllib.", "http.client."),
    *("ftplib.", "smtplib.", "sqlite3.", "webbrowser.", "sys.settrace", "sys.setprofile"),
)
"""How the names begin of what is not done for any request: PEP 578, and the table of audit events in Python's docs."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["__import__('os').system('true')", "b"]}}, "required": ["a"]}
CODE = "{{ cycler.__init__.__globals__.os.popen('true').read() }} __import__('os').system('true') file:///etc/passwd"
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SAID = {"messages": [{"role": "user", "content": CODE}]}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
CHAT = b"/v1/chat/completions"
HOSTILE = [
    post(CHAT, SAID),
    post(CHAT, {**SAID, "chat_template": CODE}),
    post(CHAT, {**SAID, "chat_template_kwargs": {"tools": CODE, "documents": [CODE], "__class__": CODE}}),
    post(CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    post(CHAT, {**SAID, "tools": [TOOL]}),
    post(CHAT, {**SAID, "tools": [TOOL], "tool_choice": "required", "max_tokens": 8}),
    post(CHAT, {**SAID, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    post(b"/v1/completions", {"prompt": CODE, "structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/s.json"}}}),
    post(b"/v1/completions", {"prompt": CODE, "structured_outputs": {"regex": "(" * 2000}}),
    post(b"/v1/responses", {"input": CODE, "store": True, "tools": [{"type": "code_interpreter"}]}),
    post(b"/v1/messages", {**SAID, "max_tokens": 4}, b"anthropic-version: 2023-06-01"),
    post(b"/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
    post(b"/tokenize", SAID),
    request(b"/..%2f..%2fetc/passwd", b"GET", KEY),
    request(b"/static/../../aserve/__init__.py", b"GET", KEY),
]


class Audit:
    """Keeps the events of `NOBODYS` while it `looks`. A hook cannot be taken away: there is one for the process."""

    def __init__(self) -> None:
        self.looks = False
        self.events: list[str] = []

    def __call__(self, name: str, arguments: tuple[object, ...]) -> None:
        if self.looks and name.startswith(NOBODYS):
            self.events.append(f"{name} {arguments!r}"[:200])

    @contextmanager
    def looking(self) -> Iterator[list[str]]:
        """The events from here to the end, added as they happen."""
        self.events.clear()
        self.looks = True
        try:
            yield self.events
        finally:
            self.looks = False


@pytest.fixture(scope="module")
def audit() -> Audit:
    audit = Audit()
    sys.addaudithook(audit)
    return audit


async def ask_all(site: Site) -> list[int]:
    """The status of each, on a connection of its own."""
    statuses = []
    for data in (*REQUESTS, *HOSTILE):
        client = await site.connect()
        statuses.append((await client.ask(data)).status)
        await client.close()
    await site.quiet()
    return statuses


async def test_no_request_runs_fetches_loads_or_writes_anything(audit: Audit):
    call = json.dumps({"name": "f", "arguments": {"a": "__import__('os').system('true')"}})
    async with (
        speaking(f"<think>{CODE}</think><tool_call>{call}</tool_call>") as engine,
        serving(create_app(engine, api_keys=[f"{CANARY}-key"])) as site,
    ):
        first = await ask_all(site)
        with audit.looking() as events:
            again = await ask_all(site)
    assert again == first
    assert {200, 400, 401, 404} <= set(first)
    assert max(first) <= 501
    assert events == []


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("exec", lambda: eval("1")),
        ("open", lambda: open("/dev/null").close()),
        ("os.listdir", lambda: __import__("os").listdir("/")),
        ("socket.getaddrinfo", lambda: __import__("socket").getaddrinfo("127.0.0.1", 1)),
        ("pickle.find_class", lambda: __import__("pickle").loads(b"cbuiltins\nlen\n.")),
    ],
)
async def test_the_hook_hears_what_it_looks_for(audit: Audit, name: str, does):
    with audit.looking() as events:
        await asyncio.to_thread(does)
    assert any(event.startswith(name) for event in events)
