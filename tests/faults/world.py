"""A whole engine and its HTTP application in one process, the clients of one case, and what each of them was told.

The model is `FakeKV`, whose tokens tell of any block that is wrong; time stands still, and threads are the event loop's
own, so that equal cases run equally.
"""

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from aserve.adapters import Adapters
from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.errors import UnavailableError
from aserve.core.params import SamplingParams
from aserve.engine import Engine, EngineParts
from aserve.http import create_app
from aserve.http.direct import STATE_KEY, DirectLine
from aserve.scheduler.scheduler import Scheduler
from aserve.text.chat_template import ChatTemplate
from tests.engines import EOS, TEMPLATE, VOCAB_SIZE, byte_tokenizer
from tests.fakes import FakeClock, FakeKV, ScriptedRunner

LETTERS = range(ord("a"), ord("e"))
"""What the model says, so that every answer is text."""
CALL_ID = re.compile(rb"call_[0-9a-f]{24}")
"""Drawn anew for each call of a tool."""
BLOCK_SIZE = 8
NUM_BLOCKS = 160
MAX_MODEL_LEN = 640
HANGS_S = 1.0
LOOKS = 20
"""In which whoever waits for ever is found out: where the whole process stands still, one of them is over."""
DEAD_STATUS = 503
"""What everybody is told of an engine that has ended."""
EMBEDDER = "branches"
"""The client who uses no HTTP."""

WHOSE: ContextVar[str] = ContextVar("whose", default="")
"""The client for whom the code runs; "" in the engine's own tasks."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat stream": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
        | {"max_tokens": 7, "temperature": 0},
    ),
    "logprobs": (TEXT, {"prompt": "abcdabc", "max_tokens": 5, "logprobs": 1, "echo": True, "temperature": 0}),
    "two choices": (
        TEXT,
        {"prompt": "once upon", "max_tokens": 6, "n": 2, "temperature": 1, "seed": 5, "stream": True},
    ),
    "stop string": (
        CHAT,
        {"messages": [{"role": "user", "content": "stop"}], "max_tokens": 40, "stop": ["db"], "temperature": 0},
    ),
    "stop stream": (
        TEXT,
        {"prompt": "halt", "max_tokens": 40, "stop": ["bc", "ddd"], "stream": True, "temperature": 0},
    ),
    "two prompts": (TEXT, {"prompt": ["left", "right"], "max_tokens": 5, "stream": True, "temperature": 0}),
    "ranked": (TEXT, {"prompt": "rank", "max_tokens": 3, "n": 1, "best_of": 2, "temperature": 1, "seed": 2}),
    "beams": (TEXT, {"prompt": "beam", "max_tokens": 8, "n": 3, "use_beam_search": True, "temperature": 0}),
    "long": (TEXT, {"prompt": list(b"0123456789abcdef" * 33), "max_tokens": 2, "temperature": 0}),
    "plain": (TEXT, {"prompt": "plain", "max_tokens": 6, "temperature": 0}),
    "tokenize": ("/tokenize", {"prompt": "x" * 2100, "return_token_strs": True}),
    "tokenize chat": ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    "too long": (TEXT, {"prompt": "x" * 6000}),
    "detokenize": ("/detokenize", {"tokens": list(b"some text")}),
}
"""What each client asks: path and body."""
NEXT = (TEXT, {"prompt": "and now?", "max_tokens": 3, "temperature": 0})


@dataclass
class Answer:
    """What a client was told. escaped: what the application raised; broken: which rule of ASGI it broke."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    escaped: str = ""
    broken: str = ""

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.status == 200 and self.body.startswith(b"data: ")

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The error that it ends with; None where it has none that is well-formed."""
        try:
            if not self.is_stream:
                return _error_of(json.loads(self.body), self.status) if self.is_whole else None
            *_, last, done, end = bytes(self.body).decode().split("\n\n")
            if (done, end) != ("data: [DONE]", "") or not self.is_whole:
                return None
            return _error_of(json.loads(last.removeprefix("data: ")), 500)
        except ValueError:
            return None

    @property
    def told(self) -> object:
        """What it says, but for when, in how many pieces and under which ids; the bare bytes of what cannot be read."""
        try:
            if not self.is_stream:
                return self.status, self.is_whole, _timeless(json.loads(CALL_ID.sub(b"", self.body)))
            return self.status, self.is_whole, self.texts, self.body.endswith(b"data: [DONE]\n\n")
        except (ValueError, KeyError, TypeError):
            return self.status, bytes(self.body)

    @property
    def texts(self) -> Mapping[int, list[Any]]:
        """Of a stream: each choice's text and why it ended."""
        told: dict[int, list[Any]] = {}
        for event in bytes(self.body).decode().split("\n\n"):
            chunk = json.loads(event.removeprefix("data: ")) if event.startswith("data: {") else {}
            for choice in chunk.get("choices", ()):
                entry = told.setdefault(choice["index"], ["", None])
                entry[0] += _said(choice["delta"]) if "delta" in choice else choice["text"]
                entry[1] = choice["finish_reason"] or entry[1]
            if chunk.get("usage"):
                told[-1] = [chunk["usage"]["completion_tokens"], chunk["usage"]["prompt_tokens"]]
        return told

    def begins(self, whole: "Answer") -> bool:
        """Whether no text of it is other than that of a whole answer."""
        return all(whole.texts.get(index, [""])[0][: len(text)] == text for index, (text, _) in self.texts.items())


def _said(delta: Mapping[str, Any]) -> str:
    """Thoughts, content, and calls as far as they have come."""
    calls = [call["function"] for call in delta.get("tool_calls", ())]
    texts = [delta.get("reasoning") or "", delta.get("content") or ""]
    return "".join([*texts, *(call.get("name", "") + call.get("arguments", "") for call in calls)])


def _error_of(body: Any, status: int) -> Mapping[str, Any] | None:
    error = body.get("error") if isinstance(body, dict) else None
    is_well_formed = isinstance(error, dict) and error.keys() == {"message", "type", "param", "code"}
    return error if is_well_formed and status >= 400 else None


def _timeless(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    usage = {**body["usage"], "prompt_tokens_details": None} if "usage" in body else None
    return {**body, "created": None, "usage": usage}


class InlineExecutor(ThreadPoolExecutor):
    """Does work where it is submitted: the order of all that happens is that of the event loop."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments, **options))
        except BaseException as error:
            done.set_exception(error)
        return done


@cache
def shared(chat_template: str) -> tuple[Any, ChatTemplate]:
    """What no case changes: a tokenizer and a chat template."""
    return byte_tokenizer(), ChatTemplate({"default": chat_template}, {})


class World:
    """One engine, its application, and the seams at which a fault may be put. An async context manager.

    asked, asked_next: what each client asks, and who comes afterwards. chat_template, formats: of the model.
    right_statuses: of undisturbed answers; 0 is that of who has left. A world that has other rooms in it overrides
    these, and how its parts are made.
    """

    asked: Mapping[str, tuple[str, dict[str, Any]]] = ASKED
    asked_next: tuple[str, dict[str, Any]] = NEXT
    chat_template = TEMPLATE
    formats: Mapping[str, Any] = MappingProxyType({})
    right_statuses: tuple[int, ...] = (200, 400, 0)
    scheduler_class: Callable[..., Scheduler] = Scheduler

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        tokenizer, template = shared(self.chat_template)
        self.tokenizer = copy.copy(tokenizer)
        self.template = copy.copy(template)
        self.clock = Clock()
        self.adapters = Adapters(None)
        self.scheduler = self.new_scheduler()
        self.runner: Any = ScriptedRunner(
            model=self.new_model(), land_errors=dict.fromkeys(failing_steps, ValueError())
        )
        self.transport = Transport()
        self.engine = Engine(lambda _report: self._parts(), clock=lambda: self.clock.read())
        self.engine.workers._executor = InlineExecutor(1)
        self.app = create_app(self.engine)

    def new_scheduler(self, **more: Any) -> Scheduler:
        """Of this world's sizes."""
        sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 640, "max_model_len": MAX_MODEL_LEN, "watermark": 0.0}
        return self.scheduler_class(**{"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, **sizes, **more})

    def new_model(self) -> FakeKV:
        """What the scripted runner computes with."""
        return FakeKV(BLOCK_SIZE, LETTERS, seeded=True)

    async def __aenter__(self) -> "World":
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.engine.aclose()
        except BaseException:
            if not self.has_died:
                raise

    @property
    def has_died(self) -> bool:
        """Whether the engine has ended by itself."""
        return self.engine.died.is_set()

    def _parts(self) -> EngineParts:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=12,
            max_num_batched_tokens=640,
            watermark=0.0,
            enable_prefix_caching=True,
        )
        info = ModelInfo(
            names=("scripted",),
            root="/models/scripted",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_ids=frozenset({EOS}),
            created_s=1_700_000_000,
            **self.formats,
        )
        return EngineParts(info, config, self.scheduler, self.runner, self.tokenizer, self.template, self.adapters)

    async def answers(self) -> dict[str, Answer]:
        """All clients at once; what each was told."""
        tasks = {name: asyncio.create_task(self.ask(name, *asked)) for name, asked in self.asked.items()}
        tasks |= {EMBEDDER: asyncio.create_task(self._branch(EMBEDDER))}
        tasks |= {"leaver": asyncio.create_task(self._leave("leaver"))}
        await in_time(tasks.values())
        return {name: task.result() for name, task in tasks.items()}

    async def ask(
        self,
        name: str,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        leaves_after: int = 0,
        method: str = "POST",
        media_type: str = "application/json",
    ) -> Answer:
        """One client's request over ASGI. leaves_after: so many messages of the answer; 0 never, -1 at once."""
        WHOSE.set(name)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        client = Client(self.transport, raw, leaves_after)
        scope = _scope(path, name, client) | {"method": method}
        scope["headers"].append((b"content-type", media_type.encode()))
        try:
            await self.app(scope, client.receive, client.send)
        except BaseException as error:
            client.answer.escaped = type(error).__name__
        return client.answer

    async def next_answer(self) -> Answer:
        """What somebody is told who comes afterwards."""
        asked = asyncio.create_task(self.ask("next", *self.asked_next))
        await in_time([asked])
        return asked.result()

    def lost(self) -> Iterator[str]:
        """What somebody was told is kept, and is not; in words. Called when nobody asks for anything any more."""
        return iter(())

    async def _leave(self, name: str) -> Answer:
        """A client who has had enough. What it is told until then is its own business."""
        body = {"prompt": "endless", "max_tokens": 60, "stream": True}
        answer = await self.ask(name, TEXT, body, leaves_after=4)
        return Answer(escaped=answer.escaped, broken=answer.broken)

    async def _branch(self, name: str) -> Answer:
        """An embedder who forks the answer to a conversation in the middle, and aborts another."""
        WHOSE.set(name)
        answer = Answer(status=200, is_whole=True)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=6)
            prompt = await self.engine.encode_chat([{"role": "user", "content": "branch"}], must_fit=True)
            async with self.engine.open(prompt, params, starts_text=True) as mailbox:
                first = await anext(mailbox)
                async with self.engine.fork(mailbox, [SamplingParams(temperature=0.0, max_tokens=4)]) as [branch]:
                    texts = [[delta.text async for delta in one] for one in (branch, mailbox)]
            async with self.engine.open("abort", params, request_id="aborted") as mailbox:
                await anext(mailbox)
                self.engine.abort("aborted")
                reasons = [delta.finish_reason async for delta in mailbox]
            told = {"texts": ["", first.text + "".join(texts[1])], "branched": True, "ended": reasons[-1].value}
            answer.body += json.dumps(told).encode()
        except BaseException as error:  # an embedder is told by what is raised
            status = DEAD_STATUS if isinstance(error, UnavailableError) else 500
            body = {"error": {"message": type(error).__name__, "type": "", "param": None, "code": None}}
            answer = Answer(status, bytearray(json.dumps(body).encode()), is_whole=True)
        return answer


async def in_time(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for them. Raises `TimeoutError` where one of them hangs."""
    for _ in range(LOOKS):
        _, pending = await asyncio.wait(tasks, timeout=HANGS_S)
        if not pending:
            return
    raise TimeoutError


class Clock(FakeClock):
    """With a name for being read, at which a trap can be put."""

    def read(self) -> float:
        """The time."""
        return self()


class Transport:
    """What a server does for all of its connections: the seam between it and the application."""

    async def receive(self, client: "Client") -> Mapping[str, Any]:
        """The client's next message."""
        return await client.next_message()

    async def send(self, client: "Client", message: Mapping[str, Any]) -> None:
        """A message to the client."""
        client.take(message)

    def is_clear(self) -> bool:
        """Of a direct line."""
        return True

    def write(self, client: "Client", piece: bytes) -> bool:
        """Of a direct line."""
        return client.take_piece(piece)


class Client:
    """One connection, and what came over it."""

    def __init__(self, transport: Transport, body: bytes, leaves_after: int) -> None:
        self.answer = Answer()
        self.line = DirectLine()
        self._transport = transport
        self._bodies = [body]
        self._left = asyncio.Event()
        self._leaves_after = leaves_after
        if leaves_after < 0:
            self._left.set()
        self._num_pieces = 0
        self._has_begun = False

    async def receive(self) -> Mapping[str, Any]:
        """ASGI's."""
        return await self._transport.receive(self)

    async def send(self, message: Mapping[str, Any]) -> None:
        """ASGI's."""
        await self._transport.send(self, message)

    async def next_message(self) -> Mapping[str, Any]:
        """The body, then, when it is time, the disconnect."""
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def take(self, message: Mapping[str, Any]) -> None:
        """A message of the application's, in the order that ASGI asks for."""
        if message["type"] == "http.response.start":
            self._rule(not self._has_begun, "two answers to one request")
            self._has_begun, self.answer.status = True, message["status"]
            return
        self._rule(self._has_begun and not self.answer.is_whole, "a body before its start or after its end")
        if self.line.is_requested_by(message["body"]):
            self.line.connect(self._transport.is_clear, lambda piece: self._transport.write(self, piece))
        self.take_piece(message["body"])
        self.answer.is_whole = not message.get("more_body", False)

    def take_piece(self, piece: bytes) -> bool:
        """Of a body."""
        self.answer.body += piece
        self._num_pieces += 1
        if self._num_pieces == self._leaves_after:
            self._left.set()
        return True

    def _rule(self, holds: bool, rule: str) -> None:
        if not holds:
            self.answer.broken = rule


def _scope(target: str, name: str, client: Client) -> dict[str, Any]:
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "http_version": "1.1",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"aserve"), (b"x-request-id", name.replace(" ", "-").encode())],
        "state": {STATE_KEY: client.line},
    }


def held(world: World) -> Iterator[str]:
    """What an engine that nobody uses any more still has, in words."""
    loop = world.engine._loop
    counts = world.scheduler.statistics()
    if (counts.num_used_blocks, counts.num_running, counts.num_waiting, counts.num_swapped) != (0, 0, 0, 0):
        yield f"blocks, rows or queues: {counts}"
    if loop is not None and (loop._readers or loop._choices):
        yield f"readers {list(loop._readers)}, choices {list(loop._choices)}"
    if any(adapter.num_users for adapter in world.adapters._known.values()) or world.adapters._num_waiting:
        yield "users of adapters, or who waits for one"
    if world.adapters._num_places != len(world.adapters._in_memory) or world.adapters._waiters:
        yield "places of adapters"
    if world.scheduler._roster.histories:
        yield "histories"
    if any(usage.num_open for usage in world.engine.tenants.usages()):
        yield "requests that count as open"
    if loop is not None and not world.has_died and world.engine._watch.done():
        yield "nobody keeps watch"
