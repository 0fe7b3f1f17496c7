"""What is kept of responses, and what later requests are told of it: of their own tenant's alone.

A response that the store has as queued or in progress, and that nobody makes, was being made when a process ended: it
reads as failed.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.http.errors import HttpError, echo
from aserve.http.openai.responses.background import Jobs
from aserve.http.openai.responses.items import REFERENCE, Item, response_of, with_own_ids
from aserve.http.openai.responses.shapes import MAX_ITEMS
from aserve.http.openai.responses.wire import TERMINAL, Response
from aserve.stores.responses import ResponseStore, StoredResponse
from aserve.workers import Workers

OFF_LOOP_BYTES: Final = 64 * 1024
"""Longer ones are coded and decoded in a thread."""
MAX_HISTORY_BYTES: Final = 16 * 1024 * 1024
"""Of the items that a response goes on from, as JSON."""
MAX_REFERRED_BYTES: Final = 16 * MAX_HISTORY_BYTES
"""Of the responses that an input's references lead to, with what they answer: they are read one by one."""
LOST: Final = {"code": "server_error", "message": "the server ended before the response did"}


class PreviousResponseError(InvalidRequestError):
    """There is no response of the id that previous_response_id names, or no more."""

    code = "previous_response_not_found"


class Kept:
    """The responses of an application. jobs: those that are made in the background."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self.jobs = Jobs()

    async def keep(self, tenant: str, response: Response, items: list[Item], workers: Workers | None) -> None:
        """Returns when it is there. items: all that it answers. workers: where those are many, or long."""
        encode = msgspec.json.encode
        given = encode(items) if workers is None else await workers.run(encode, items)
        record = StoredResponse(id=response["id"], tenant=tenant, response=encode(response), input=given)
        await self._store.put(record)

    async def forget(self, tenant: str, id: str) -> None:
        """Delete it; one that is being made is cancelled. Raises as `response`."""
        if (job := self.jobs.running(tenant, id)) is not None:
            await job.cancel()
        self.jobs.forget(id)
        if not await self._store.delete(tenant, id):
            raise _not_found(id)

    async def response(self, tenant: str, id: str) -> Response:
        """As it is now. Raises `HttpError` (404) where there is none."""
        if (job := self.jobs.running(tenant, id)) is not None:
            return job.response
        record = await self._store.get(tenant, id)
        if record is None:
            raise _not_found(id)
        return _read(record)

    async def items(self, tenant: str, id: str) -> list[Item]:
        """What a response answers: its input, behind those of the responses before it, each with an id of its own.

        Raises as `response`.
        """
        record = await self._store.get(tenant, id)
        if record is None:
            raise _not_found(id)
        return with_own_ids(msgspec.json.decode(record.input))

    async def history(self, tenant: str, id: str, workers: Workers) -> list[Item]:
        """What a request goes on from that names a response as the one before it. Raises `InvalidRequestError`."""
        record = None if self.jobs.running(tenant, id) else await self._store.get(tenant, id)
        if record is None:
            is_running = self.jobs.running(tenant, id) is not None
            told = f"the response {echo(id)} is still in progress" if is_running else f"there is no response {echo(id)}"
            raise PreviousResponseError(f"previous_response_id: {told}", "previous_response_id")
        if record.num_bytes > MAX_HISTORY_BYTES:
            raise InvalidRequestError(
                f"previous_response_id: the conversation has over {MAX_HISTORY_BYTES} bytes", "previous_response_id"
            )
        items = await workers.run(_history, record) if record.num_bytes > OFF_LOOP_BYTES else _history(record)
        if len(items) > MAX_ITEMS:
            raise InvalidRequestError(
                f"previous_response_id: the conversation has over {MAX_ITEMS} items", "previous_response_id"
            )
        return items

    async def resolved(self, tenant: str, items: list[Item], workers: Workers) -> list[Item]:
        """Items with those that references lead to in place of these. Raises `InvalidRequestError` for what is gone."""
        found: dict[str, Item] = {}
        num_bytes = 0
        for id in dict.fromkeys(response_of(item["id"]) for item in items if item["type"] == REFERENCE):
            record = None if id is None else await self._store.get(tenant, id)
            if record is None:
                continue  # which is told of the item
            num_bytes += record.num_bytes
            if num_bytes > MAX_REFERRED_BYTES:
                message = f"input: it refers to conversations of over {MAX_REFERRED_BYTES} bytes"
                raise InvalidRequestError(message, "input")
            is_long = len(record.response) > OFF_LOOP_BYTES
            response = await workers.run(_read, record) if is_long else _read(record)
            found |= {item["id"]: item for item in response["output"]}
        return _referred(items, found)


def _referred(items: list[Item], found: Mapping[str, Item]) -> list[Item]:
    told = []
    num_bytes = 0
    for index, item in enumerate(items):
        if item["type"] == REFERENCE:
            id = item["id"]
            if id not in found:
                message = f"input[{index}]: there is no item {echo(id)} in the output of a response that is stored"
                raise InvalidRequestError(message, "input")
            item = found[id]
            num_bytes += len(msgspec.json.encode(item))
            if num_bytes > MAX_HISTORY_BYTES:
                message = f"input: it refers to items of over {MAX_HISTORY_BYTES} bytes"
                raise InvalidRequestError(message, "input")
        told.append(item)
    return told


def _read(record: StoredResponse) -> Response:
    response: Response = msgspec.json.decode(record.response)
    return response if response["status"] in TERMINAL else {**response, "status": "failed", "error": LOST}


def _history(record: StoredResponse) -> list[Item]:
    response = _read(record)
    if response["status"] not in ("completed", "incomplete"):
        raise InvalidRequestError(
            f"previous_response_id: the response {echo(record.id)} is {response['status']}", "previous_response_id"
        )
    items: list[Any] = msgspec.json.decode(record.input)
    return [*items, *response["output"]]


def _not_found(id: str) -> HttpError:
    return HttpError(404, "response_not_found", f"there is no response {echo(id)}")
