"""A world in which responses are kept in a file, gone on from, made in the background, cancelled and deleted."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from aserve.http import create_app
from aserve.stores.responses import SqliteStore
from tests.engines import TEMPLATE
from tests.faults.visits import Refused, Visitor, error, inline_stores, new_folder, told
from tests.faults.world import TEXT, Answer, World, in_time

URL = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 6}
TOOL = {"type": "function", "name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}}
TERMINAL = ("completed", "incomplete", "failed", "cancelled")
LONGEST = 400
"""Tokens of an answer that has not ended when it is cancelled."""


class Responder(Visitor):
    """A client who asks for responses, and notes which it was told of."""

    world: "ResponsesWorld"

    async def made(self, body: Mapping[str, Any]) -> Any:
        """One that is told when it is over, or that it waits."""
        response = await self.post(URL, body)
        self.world.kept[response["id"]] = response
        return response

    async def followed(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> list[Any]:
        """Its events. Raises `Refused` for an error among them, and for what no stream may be.

        They are numbered one by one, and one that is whole has an end.
        """
        method = "GET" if body is None else "POST"
        answer = await self.ask(path, body or b"", method=method, **options)
        blocks = bytes(answer.body).split(b"\n\n")[:-1]
        events = [json.loads(block.split(b"\ndata: ")[1]) for block in blocks if not block.startswith(b":")]
        for event in events:
            if event["type"] == "error":
                raise Refused(error(event["code"], event["message"]))
        numbers = [event["sequence_number"] for event in events]
        if numbers != list(range(numbers[0], numbers[0] + len(events))):
            raise Refused(Answer(500, broken=f"events are numbered {numbers}"))
        response = events[-1].get("response", {"status": ""})
        if response["status"] in TERMINAL:
            self.world.kept[response["id"]] = response
        elif answer.is_whole:
            raise Refused(Answer(500, broken="a stream without an end"))
        return events

    async def found(self, id: str) -> Any:
        """What is told of a response. Raises `Refused` for one that failed."""
        response = await self.get(f"{URL}/{id}")
        if response["status"] == "failed":
            raise Refused(error(**response["error"]))
        return response


def _text(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def _whole(client: Responder) -> Mapping[str, Any]:
    made = await client.made({"input": "hi", **GREEDY, "include": ["message.output_text.logprobs"]})
    found = await client.found(made["id"])
    return {"made": made, "is_found": found == made, "items": await client.get(f"{URL}/{made['id']}/input_items")}


async def _streamed(client: Responder) -> Mapping[str, Any]:
    body = {"input": "stream", "stream": True, "tools": [TOOL], **GREEDY}
    events = await client.followed(URL, body)
    made = events[-1]["response"]
    return {"text": _text(events), "made": made, "is_found": await client.found(made["id"]) == made}


async def _gone_on_from(client: Responder) -> Mapping[str, Any]:
    first = await client.made({"input": [{"role": "user", "content": "one"}], "instructions": "be brief", **GREEDY})
    asked = {"input": "two" * 300, "previous_response_id": first["id"], "truncation": "auto", **GREEDY}
    return {"first": first, "second": await client.made(asked)}


async def _in_background(client: Responder) -> Mapping[str, Any]:
    queued = await client.made({"input": "behind", "background": True, **GREEDY})
    events = await client.followed(f"{URL}/{queued['id']}?stream=true")
    return {"text": _text(events), "made": await client.found(queued["id"])}


async def _taken_up_again(client: Responder) -> Mapping[str, Any]:
    """The client leaves in the middle, and comes back for the rest."""
    body = {"input": "both", "background": True, "stream": True, **GREEDY}
    begun = await client.followed(URL, body, leaves_after=3)
    id, number = begun[0]["response"]["id"], begun[1]["sequence_number"]
    client.world.kept.setdefault(id, begun[0]["response"])
    rest = await client.followed(f"{URL}/{id}?stream=true&starting_after={number}")
    return {"text": _text(begun[:2]) + _text(rest), "made": await client.found(id)}


async def _cancelled(client: Responder) -> Mapping[str, Any]:
    queued = await client.made({"input": "never", "background": True, "max_output_tokens": LONGEST})
    cancelled = await client.post(f"{URL}/{queued['id']}/cancel", b"")
    client.world.kept[queued["id"]] = cancelled
    return {"status": cancelled["status"], "is_found": await client.found(queued["id"]) == cancelled}


async def _deleted(client: Responder) -> Mapping[str, Any]:
    made = await client.made({"input": "gone", "background": True, "max_output_tokens": LONGEST})
    del client.world.kept[made["id"]]  # whatever comes of it
    deleted = await client.get(f"{URL}/{made['id']}", method="DELETE")
    return {"deleted": deleted, "is_gone": await client.is_gone(f"{URL}/{made['id']}")}


async def _not_stored(client: Responder) -> Mapping[str, Any]:
    made = await client.post(URL, {"input": "secret", "store": False, **GREEDY})
    return {"made": made, "is_gone": await client.is_gone(f"{URL}/{made['id']}")}


VISITS = MappingProxyType(
    {
        "whole": _whole,
        "streamed": _streamed,
        "gone on from": _gone_on_from,
        "in background": _in_background,
        "taken up again": _taken_up_again,
        "cancelled": _cancelled,
        "deleted": _deleted,
        "not stored": _not_stored,
    }
)


class ResponsesWorld(World):
    """kept: by their ids, what clients were told of responses that they can ask for."""

    asked = MappingProxyType({"plain": (TEXT, {"prompt": "plain", "max_tokens": 6, "temperature": 0})})
    chat_template = TEMPLATE + "{% if tools %}{{ tools | length }}{% endif %}"
    formats = MappingProxyType({"call_format": "hermes"})

    async def __aenter__(self) -> "ResponsesWorld":
        await super().__aenter__()
        self._folder = new_folder()
        self.kept: dict[str, Any] = {}
        self.store = self._opened()
        self.app = create_app(self.engine, response_store=self.store)
        return self

    def _opened(self) -> SqliteStore:
        with inline_stores():
            return SqliteStore(os.path.join(self._folder.name, "responses.db"))

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self.store.close()
        self._folder.cleanup()

    async def answers(self) -> dict[str, Answer]:
        """With those of visits. Returns when nothing is made in the background any more."""
        before = asyncio.all_tasks()
        visits = {name: asyncio.create_task(told(Responder(self, name), visit)) for name, visit in VISITS.items()}
        answers = await super().answers()
        await in_time(visits.values())
        if behind := asyncio.all_tasks() - before:
            await in_time(behind)
        return answers | {name: visit.result() for name, visit in visits.items()}

    def lost(self) -> Iterator[str]:
        """By what is in the file."""
        num_counted = self.store._num_bytes
        self.store.close()
        self.store = self._opened()
        connection = self.store._database._opened()
        ((num_bytes,),) = connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchall()
        if num_counted not in (None, num_bytes):
            yield f"the store counts {num_counted} bytes, and has {num_bytes}"
        for id, response in self.kept.items():
            record = self.store._get(connection, "", id)
            if record is None:
                yield f"a response that was told of as {response['status']}"
                continue
            status = json.loads(record.response)["status"]
            if status not in TERMINAL:
                yield f"the end of a response, which is {status}"
            elif response["status"] in TERMINAL and json.loads(record.response) != response:
                yield f"a response as it was told: {response['status']}, and kept: {status}"
