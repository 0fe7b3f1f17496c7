"""A world in which files are uploaded, and batches of their lines run behind whoever else asks."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from aserve.http import AppOptions, create_app
from aserve.http.batch.batches import ENDED
from aserve.stores.batches import BatchStore
from tests.faults.visits import Refused, Visitor, error, inline_stores, new_folder, told
from tests.faults.world import CHAT, TEXT, Answer, World, in_time

FILES, BATCHES = "/v1/files", "/v1/batches"
BOUNDARY = "boundary"
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"messages": HI, "temperature": 0}
LINES = ({**GREEDY, "max_tokens": 3}, {"messages": HI, "temperature": 9}, {**GREEDY, "max_tokens": 5})
"""The second of them is a 400."""


def _jsonl(bodies: tuple[Mapping[str, Any], ...]) -> bytes:
    lines = [
        {"custom_id": f"line {num}", "method": "POST", "url": CHAT, "body": body} for num, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Submitter(Visitor):
    """A client who uploads files and has them run."""

    world: "BatchesWorld"

    async def uploaded(self, content: bytes) -> str:
        """A file's id."""
        head = '--{0}\r\nContent-Disposition: form-data; name="{1}"{2}\r\n\r\n'
        parts = [
            head.format(BOUNDARY, "purpose", "").encode() + b"batch\r\n",
            head.format(BOUNDARY, "file", '; filename="in.jsonl"').encode() + content + b"\r\n",
        ]
        body = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
        file = await self.post(FILES, body, media_type=f"multipart/form-data; boundary={BOUNDARY}")
        self.world.files[file["id"]] = content
        return str(file["id"])

    async def begun(self, file_id: str) -> str:
        """A batch's id."""
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await self.post(BATCHES, asked)
        self.world.batches.add(batch["id"])
        return str(batch["id"])

    async def ended(self, batch_id: str) -> Any:
        """A batch at its end. Raises `Refused` for one that failed."""
        if (task := self.world.app.state.batches._tasks.get(batch_id)) is not None:
            await asyncio.wait([task])
        batch = await self.get(f"{BATCHES}/{batch_id}")
        if batch["status"] == "failed":
            [told_error] = batch["errors"]["data"]
            raise Refused(error(told_error["code"], told_error["message"]))
        return batch

    async def lines(self, file_id: str | None) -> list[Any]:
        """What is in a file of results. Raises `Refused` for a line that failed as no line ought to."""
        if file_id is None:
            return []
        content = bytes((await self.ask(f"{FILES}/{file_id}/content", method="GET")).body)
        lines = [json.loads(line) for line in content.splitlines()]
        for line in lines:
            if line["error"] is not None and not line["error"]["code"].startswith("batch_"):
                raise Refused(error(**line["error"]))
            if line["response"] is not None and line["response"]["status_code"] >= 500:
                raise Refused(Answer(500, bytearray(json.dumps(line["response"]["body"]).encode()), is_whole=True))
        return lines


async def _run(client: Submitter) -> Mapping[str, Any]:
    file_id = await client.uploaded(_jsonl(LINES))
    content = await client.ask(f"{FILES}/{file_id}/content", method="GET")
    batch = await client.ended(await client.begun(file_id))
    results = [line for field in ("output", "error") for line in await client.lines(batch[f"{field}_file_id"])]
    listed = await client.get(f"{BATCHES}?limit=100")
    is_listed = batch in listed["data"]
    return {"content": bytes(content.body).decode(), "batch": batch, "results": results, "is_listed": is_listed}


async def _cancelled(client: Submitter) -> Mapping[str, Any]:
    """How far it comes until then is a matter of time; each line is in one of the files."""
    lines = ({**GREEDY, "max_tokens": 12},) * 7
    batch_id = await client.begun(await client.uploaded(_jsonl(lines)))
    await client.post(f"{BATCHES}/{batch_id}/cancel", b"")
    batch = await client.ended(batch_id)
    results = [line for field in ("output", "error") for line in await client.lines(batch[f"{field}_file_id"])]
    return {"ended": batch["status"] in ("cancelled", "completed"), "lines": sorted(r["custom_id"] for r in results)}


async def _refused(client: Submitter) -> Mapping[str, Any]:
    """A file with a wrong line, which is told in the batch."""
    file_id = await client.uploaded(_jsonl(LINES[:1]) + b"nonsense\n")
    batch_id = await client.begun(file_id)
    if (task := client.world.app.state.batches._tasks.get(batch_id)) is not None:
        await asyncio.wait([task])
    batch = await client.get(f"{BATCHES}/{batch_id}")
    [told_error] = batch["errors"]["data"]
    if told_error["line"] is None:  # not what is wrong with the file
        raise Refused(error(told_error["code"], told_error["message"]))
    return {"batch": batch}


async def _deleted(client: Submitter) -> Mapping[str, Any]:
    content = b"never run\n"
    file_id = await client.uploaded(content)
    card = await client.get(f"{FILES}/{file_id}")
    is_listed = card in (await client.get(FILES))["data"]
    del client.world.files[file_id]  # whatever comes of it
    deleted = await client.get(f"{FILES}/{file_id}", method="DELETE")
    is_gone = await client.is_gone(f"{FILES}/{file_id}")
    return {"card": card, "is_listed": is_listed, "deleted": deleted, "is_gone": is_gone}


VISITS = MappingProxyType({"run": _run, "cancelled": _cancelled, "refused": _refused, "deleted": _deleted})


class BatchesWorld(World):
    """files, batches: which clients were told of, by their ids; of a file the content."""

    asked = MappingProxyType(
        {
            "plain": (TEXT, {"prompt": "plain", "max_tokens": 6, "temperature": 0}),
            "chat": (CHAT, GREEDY | {"max_tokens": 5, "stream": True}),
        }
    )

    async def __aenter__(self) -> "BatchesWorld":
        await super().__aenter__()
        self._folder = new_folder()
        self.files: dict[str, bytes] = {}
        self.batches: set[str] = set()
        self._path = os.path.join(self._folder.name, "batches.db")
        with inline_stores():
            self.app = create_app(self.engine, options=AppOptions(batch_store=self._path))
        self._store: BatchStore = self.app.state.batches.store
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._store.close()
        self._folder.cleanup()

    async def answers(self) -> dict[str, Answer]:
        """With those of visits. Returns when no batch runs any more."""
        visits = {name: asyncio.create_task(told(Submitter(self, name), visit)) for name, visit in VISITS.items()}
        answers = await super().answers()
        await in_time(visits.values())
        if running := list(self.app.state.batches._tasks.values()):
            await in_time(running)
        return answers | {name: visit.result() for name, visit in visits.items()}

    def lost(self) -> Iterator[str]:
        """By what is in the file."""
        self._store.close()
        with inline_stores():
            self._store = BatchStore(self._path)
        execute = self._store._database._opened().execute
        files = dict(execute("SELECT id, content FROM files"))
        for id, content in self.files.items():
            if files.get(id) != content:
                yield f"a file that was uploaded: {content[:30]!r}"
        batches = {id: json.loads(state) for id, state in execute("SELECT id, state FROM batches")}
        yield from (f"a batch {id}" for id in self.batches - batches.keys())
        for state in batches.values():
            if state["status"] not in ENDED:
                yield f"the end of a batch, which is {state['status']}"
            written = [files.get(state[f"{field}_file_id"], b"") for field in ("output", "error")]
            num_lines = sum(content.count(b"\n") for content in written)
            if state["status"] in ("completed", "cancelled") and num_lines != state["request_counts"]["total"]:
                yield f"lines of a batch of {state['request_counts']['total']}, of which {num_lines} are in files"
        for (id,) in execute("SELECT DISTINCT batch_id FROM results"):
            yield f"room: results of {id}, which has ended"
