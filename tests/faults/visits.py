"""Clients that ask for several things in turn, and stores that work where they are asked to.

A visit ends with the first error that it is answered with, which is then what the client was told.
"""

import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import pytest

from aserve.stores import database
from tests.faults.world import WHOSE, Answer, InlineExecutor, World

IN_MEMORY = "/dev/shm"
DRAWN = re.compile(r"\b(resp|msg|rs|fc|fco|call|batch|batch_req|file|chatcmpl|cmpl)[_-][0-9a-f]{20,}")
"""Ids, which are drawn anew each time."""
DRAWN_ALONE = re.compile(r'("request_id": ?)"[0-9a-f]{32}"')
TIMES = re.compile(r'("(?:\w+_at|created|cached_tokens)": ?)\d+')
"""When something was, and what of it was in the cache, which depends on who came before."""


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: stores wait for what is written, again and again."""
    return tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None)


class StoreExecutor(InlineExecutor):
    """In place of the thread of a store."""


class Statements(sqlite3.Connection):
    """A connection whose calls can be trapped: `with` ends its transactions by them, as sqlite3's own does in C."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        """As sqlite3's."""
        return super().execute(*arguments)

    def commit(self) -> None:
        """As sqlite3's."""
        super().commit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if kind is not None:
            self.rollback()
            return False
        try:
            self.commit()
        except BaseException:
            self.rollback()
            raise
        return False


@contextmanager
def inline_stores() -> Iterator[None]:
    """Stores that are made meanwhile do their work in the event loop's thread, by such statements."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(database, "ThreadPoolExecutor", StoreExecutor)
        patches.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Statements))
        yield


class Refused(Exception):
    """A step of a visit was answered by an error."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Visitor:
    """One client."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    async def ask(self, path: str, body: Mapping[str, Any] | bytes = b"", **options: Any) -> Answer:
        """One step. Raises `Refused`."""
        answer = await self.world.ask(self.name, path, body, **options)
        if answer.status != 200 or answer.escaped or answer.broken:
            raise Refused(answer)
        return answer

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **options: Any) -> Any:
        """A step that is answered by JSON."""
        return json.loads((await self.ask(path, body, **options)).body)

    async def get(self, path: str, method: str = "GET") -> Any:
        """Likewise, without a body."""
        return json.loads((await self.ask(path, method=method)).body)

    async def is_gone(self, path: str) -> bool:
        """Whether there is nothing at a path, or no more. Raises `Refused` for another error."""
        answer = await self.world.ask(self.name, path, b"", method="GET")
        if answer.status not in (200, 404):
            raise Refused(answer)
        return answer.status == 404


Client = TypeVar("Client", bound=Visitor)


async def told(client: Client, visit: Callable[[Client], Awaitable[Mapping[str, Any]]]) -> Answer:
    """What a client was told by a visit, but for ids and times."""
    WHOSE.set(client.name)
    try:
        said = json.dumps(await visit(client))
    except Refused as refused:
        return refused.answer
    for drawn, instead in ((DRAWN, r"\1_"), (DRAWN_ALONE, r'\1""'), (TIMES, r"\g<1>0")):
        said = drawn.sub(instead, said)
    return Answer(200, bytearray(said.encode()), is_whole=True)


def error(code: Any, message: Any) -> Answer:
    """What a client was told that learned of an error otherwise than by a status."""
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    return Answer(500, bytearray(json.dumps(body).encode()), is_whole=True)
