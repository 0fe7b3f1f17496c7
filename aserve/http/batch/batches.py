"""Batches: files of requests, run behind everybody else's, a line at a time, and taken up again where they were left.

    validating -> in_progress -> finalizing -> completed
        '-> failed      '-> cancelling -> cancelled
                        '-> expired

A line that was answered is in the store, and not run again. A batch's state is the object that the API tells.

A process that dies says nothing of the line that it died of. So those that it may have been running are suspected by
the next one. Who was so twice is run alone; and who was run alone when a process died is not run any more.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from aserve.core.errors import AserveError, InvalidRequestError, StoreError, UnavailableError
from aserve.core.faults import log_fault, report
from aserve.edges import heard, is_fault
from aserve.engine import Engine, EngineState
from aserve.http.batch.lines import LineFields, LineRunner, failed_line, line_of
from aserve.http.batch.turns import Turns
from aserve.http.endpoint import Handler
from aserve.http.errors import HttpError
from aserve.http.tasks import task_group
from aserve.stores.batches import BatchStore, StoredBatch, StoredFile

MAX_BATCHES: Final = 64
"""Under way at once."""
MAX_LINES: Final = 50_000
MAX_TOLD_ERRORS: Final = 20
WINDOW_S: Final = 24 * 3600
MAX_DEATHS: Final = 2
"""A line that was perhaps being run at so many is run alone."""
RETRY_S: Final = 10.0
"""After which a batch is gone on with whose store has failed."""
ENDED: Final = frozenset({"completed", "failed", "cancelled", "expired"})

State = dict[str, Any]
_log = logging.getLogger(__name__)


class Batches:
    """Of one engine. handlers: of the routes that lines may name, by their urls. clock: seconds of the day's time."""

    def __init__(
        self,
        engine: Engine,
        store: BatchStore,
        handlers: Mapping[str, Handler],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._engine = engine
        self._runner = LineRunner(engine, handlers)
        self._turns = Turns(engine)
        self.urls = self._runner.urls
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, StoredBatch] = {}
        self._cancelled: set[str] = set()
        self._has_begun = False
        self._has_died = False

    async def resume(self) -> None:
        """Go on with all that have not ended."""
        left = [batch for batch in await self.store.batches() if batch.state["status"] not in ENDED]
        if not self._has_begun:
            self._has_begun = True
            num_suspects = await self.store.begin_running(self._turns.num_places)
            for batch in left:
                if num_suspects and batch.state["status"] == "in_progress":
                    await self.store.suspect(batch.id, num_suspects)
                if await self._to_run_alone(batch.id):
                    self._turns.suspect(batch.id)
        for batch in left:
            if batch.id not in self._tasks:
                self._start(batch)

    async def _to_run_alone(self, id: str) -> list[int]:
        suspects = await self.store.suspects(id)
        return [one.line for one in suspects if one.num_deaths >= MAX_DEATHS and not one.is_guilty]

    def close(self) -> None:
        """Close the store. Lines of a process whose engine has died are suspected, as those of one that was killed."""
        self.store.close(has_died=self._has_died)

    async def create(self, tenant: str, url: str, input_file_id: str, metadata: Any) -> State:
        """A new one, which begins now. Raises a 429 where too many are under way, else as `BatchStore.check_room`."""
        if len(self._tasks) >= MAX_BATCHES:
            raise HttpError(429, "too_many_batches", f"{len(self._tasks)} batches are under way, which is the limit")
        await self.store.check_room(0, "input_file_id")
        now = int(self._clock())
        state = {
            "id": f"batch_{secrets.token_hex(16)}",
            "object": "batch",
            "endpoint": url,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_S,
            **dict.fromkeys(
                (
                    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
                    *("cancelling_at", "cancelled_at"),
                )
            ),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        await asyncio.shield(asyncio.create_task(self._take(StoredBatch(state["id"], tenant, now, state))))
        return state

    async def _take(self, batch: StoredBatch) -> None:
        """What is kept is begun with, whether its client waits for it or has left."""
        await self.store.put_batch(batch)
        self._start(batch)

    async def told(self, tenant: str) -> list[State]:
        """Those of a tenant as they are now, the newest first."""
        found = []
        for batch in await self.store.batches(tenant):
            if batch.state["status"] not in ENDED:
                await self._count(batch)
            found.append(batch.state)
        return found

    async def cancel(self, tenant: str, id: str) -> None:
        """Run no more of its lines. Those that run are answered."""
        batch = self._running.get(id)
        if batch is not None and batch.tenant == tenant and batch.state["status"] not in ENDED:
            self._cancelled.add(id)
            await self._move(batch, "cancelling")

    async def wait(self) -> None:
        """Until nothing runs."""
        await asyncio.gather(*self._tasks.values())

    def _start(self, batch: StoredBatch) -> None:
        if batch.state["status"] == "cancelling":
            self._cancelled.add(batch.id)
        task = asyncio.create_task(self._run(batch), name="aserve: a batch")
        self._tasks[batch.id] = task
        self._running[batch.id] = batch
        task.add_done_callback(lambda _task: self._ended(batch.id))

    def _ended(self, id: str) -> None:
        del self._tasks[id], self._running[id]
        self._cancelled.discard(id)
        self._turns.forget(id)

    async def _run(self, batch: StoredBatch) -> None:
        """The edge of a batch's task."""
        try:
            await self._advance_in_the_end(batch)
        except UnavailableError:
            self._has_died |= self._engine.state is EngineState.DEAD
            _log.info("%s will be taken up again", batch.id)
        except BaseException as error:
            if not is_fault(error):
                raise
            await self._give_up(batch, report(_log, "running a batch", error, batch.id))

    async def _give_up(self, batch: StoredBatch, error: AserveError) -> None:
        """End a batch at which something failed, with what its lines have come to.

        Where not even that can be kept, it stays as it was, and is taken up again by the next process.
        """
        batch.state["errors"] = _errors(error)
        try:
            await self._end(batch, "failed")
        except BaseException as another:
            if not is_fault(another):
                raise
            log_fault(_log, "ending a batch", another, batch.id)

    async def _advance_in_the_end(self, batch: StoredBatch) -> None:
        """Where the disk is full, or the store fails otherwise, when that is over."""
        while True:
            try:
                await self._advance(batch)
            except StoreError:
                _log.warning("%s is gone on with in %g s", batch.id, RETRY_S)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _advance(self, batch: StoredBatch) -> None:
        if await self.store.file(batch.tenant, batch.state["input_file_id"]) is None:
            missing = HttpError(404, "file_not_found", "the input file is gone")
            await self._fail(batch, _errors(missing))
            return
        raw = await self.store.content(batch.state["input_file_id"])
        lines, errors = await self._engine.workers.run(_parsed, raw, batch.state["endpoint"])
        if errors:
            await self._fail(batch, {"object": "list", "data": errors})
            return
        batch.state["request_counts"]["total"] = len(lines)
        if batch.state["status"] == "validating":
            await self._move(batch, "in_progress")
        await self._give_up_guilty(batch, lines)
        await self._run_suspects(batch, lines)
        done = await self.store.done(batch.id)
        pending = ((number, line) for number, line in enumerate(lines) if number not in done)
        await self._run_lines(batch, pending)
        await self._finish(batch, lines)

    async def _give_up_guilty(self, batch: StoredBatch, lines: list[LineFields]) -> None:
        """Lines that were run alone when a process died."""
        for suspect in await self.store.suspects(batch.id):
            if suspect.is_guilty and suspect.line < len(lines):
                error = InvalidRequestError(
                    f"the server's process died {suspect.num_deaths + 1} times while this line was being run, the last "
                    "time while it was the only one: it is not run again"
                )
                told = failed_line(lines[suspect.line].custom_id, error, "line_ends_process")
                await self.store.add_result(batch.id, suspect.line, told, is_error=True)

    async def _run_suspects(self, batch: StoredBatch, lines: list[LineFields]) -> None:
        """One at a time, of all batches: if the process dies once more, it is known of which."""
        async with self._turns.alone:
            for number in await self._to_run_alone(batch.id):
                if number >= len(lines) or not await self._turns.take(
                    batch.id, None, lambda: self._why_stopped(batch) is not None
                ):
                    break
                try:
                    await self.store.run_alone(batch.id, number)
                    await self._answer(batch, number, lines[number])
                except UnavailableError:
                    if self._engine.state is not EngineState.DEAD:
                        await self.store.acquit(batch.id, number)
                    raise
                finally:
                    self._turns.give_back()
        self._turns.clear(batch.id)

    async def _run_lines(self, batch: StoredBatch, pending: Iterator[tuple[int, LineFields]]) -> None:
        failures: list[UnavailableError] = []

        def is_stopped() -> bool:
            return bool(failures) or self._why_stopped(batch) is not None

        async def work() -> None:
            for number, line in pending:
                try:
                    if not await self._turns.take(batch.id, batch.tenant, is_stopped):
                        return
                    try:
                        await self._answer(batch, number, line)
                    finally:
                        self._turns.give_back()
                except UnavailableError as error:
                    failures.append(error)
                    return

        async with task_group() as tasks:
            for _ in range(self._turns.num_places):
                tasks.create_task(heard(work()), name="aserve: lines of a batch")
        if failures:
            raise failures[0]

    async def _answer(self, batch: StoredBatch, number: int, line: LineFields) -> None:
        """The edge of a line: where it cannot be answered, that is what it came to."""
        try:
            answered = await self._runner.run(line, batch.tenant, lambda: self._why_stopped(batch) is not None)
            if answered is not None:
                await self.store.add_result(batch.id, number, answered.content, is_error=answered.is_error)
        except UnavailableError:
            raise
        except BaseException as error:
            if not is_fault(error):
                raise
            told = report(_log, "answering a line of a batch", error, batch.id)
            failed = failed_line(line.custom_id, told, told.code)
            await self.store.add_result(batch.id, number, failed, is_error=True)

    def _why_stopped(self, batch: StoredBatch) -> str | None:
        if batch.id in self._cancelled:
            return "cancelled"
        return "expired" if self._clock() > batch.state["expires_at"] else None

    async def _finish(self, batch: StoredBatch, lines: list[LineFields]) -> None:
        done = await self.store.done(batch.id)
        why = self._why_stopped(batch) if len(done) < len(lines) or batch.id in self._cancelled else None
        if why is not None:
            error = InvalidRequestError(f"the batch was {why} before this line was run")
            for number, line in enumerate(lines):
                if number not in done:
                    told = failed_line(line.custom_id, error, f"batch_{why}")
                    await self.store.add_result(batch.id, number, told, is_error=True)
        elif batch.state["status"] == "in_progress":
            await self._move(batch, "finalizing")
        await self._end(batch, why or "completed")

    async def _end(self, batch: StoredBatch, status: str) -> None:
        """Make files of what its lines have come to, and keep it as it stays."""
        for field, is_error in (("output_file_id", False), ("error_file_id", True)):
            content = await self.store.results(batch.id, is_error=is_error)
            if content:
                what = field.removesuffix("_file_id")
                id = f"file-{batch.id.removeprefix('batch_')}-{what}"  # always the same: it may be made again
                now = int(self._clock())
                file = StoredFile(id, batch.tenant, now, f"{batch.id}_{what}.jsonl", "batch_output", len(content))
                await self.store.add_file(file, content)
                batch.state[field] = id
        await self._count(batch)
        await self._move(batch, status)

    async def _count(self, batch: StoredBatch) -> None:
        done = await self.store.done(batch.id)
        counts = batch.state["request_counts"]
        batch.state["request_counts"] = {
            "total": max(counts["total"], len(done)),
            "completed": sum(not is_error for is_error in done.values()),
            "failed": sum(done.values()),
        }

    async def _fail(self, batch: StoredBatch, errors: State) -> None:
        batch.state["errors"] = errors
        await self._move(batch, "failed")

    async def _move(self, batch: StoredBatch, status: str) -> None:
        batch.state.update({"status": status, f"{status}_at": int(self._clock())})
        await self.store.put_batch(batch, drops_results=status in ENDED)


def _errors(error: AserveError) -> State:
    """A batch's, of one that is not a line's."""
    told = {"code": error.code, "message": error.message, "param": None, "line": None}
    return {"object": "list", "data": [told]}


def _parsed(raw: bytes, url: str) -> tuple[list[LineFields], list[State]]:
    """The lines, and what is wrong with them."""
    lines: list[LineFields] = []
    errors: list[State] = []
    names: set[str] = set()
    texts = [(number, text) for number, text in enumerate(raw.split(b"\n"), start=1) if text.strip()]
    if not texts or len(texts) > MAX_LINES:
        told = f"a batch has 1 to {MAX_LINES} lines, got {len(texts)}"
        return [], [{"code": "invalid_request_error", "message": told, "param": None, "line": None}]
    for number, text in texts:
        try:
            line = line_of(text, (url,))
            if line.custom_id in names:
                raise InvalidRequestError(f"custom_id: {line.custom_id!r} is there twice", "custom_id")
        except AserveError as error:
            param = getattr(error, "param", None)
            errors.append({"code": error.code, "message": error.message[:300], "param": param, "line": number})
            if len(errors) == MAX_TOLD_ERRORS:
                break
            continue
        names.add(line.custom_id)
        lines.append(line)
    return lines, errors
