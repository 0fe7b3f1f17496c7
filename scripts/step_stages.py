"""One serving process with a stopwatch at every seam of a step, and clients that take every byte at once.

    plan | launch | land (the requests' tasks run: format, write) | commit | publish | plan ...

The whole host path is real: engine, application, Hypercorn's protocol and our Connection; only the sockets, and with
`ScriptedRunner` the device, are not. A scripted step takes no time and lands as soon as every running request has had
bytes written for the step before, so that a step is all host and nothing waits. Knows nothing of how results are shown.
"""

import asyncio
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.plan import StepPlan, StepResult
from aserve.core.ports import Flight, Runner
from aserve.engine import Engine, EngineParts, Loader, Progress
from aserve.http import create_app
from aserve.http.inspector import Feed, followed
from aserve.model_folder import DEMO_FOLDER
from aserve.scheduler.scheduler import Scheduler
from aserve.server.connection import Connection
from aserve.server.connections import Connections, Limits
from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer

Stages = dict[str, list[float]]

BLOCK_SIZE = 16
NUM_SPARE_TOKENS = 256
NUM_PROMPT_TOKENS = 32
WORDS = " the house stands on a hill and looks over the sea where two ships are coming home"

now_ns = time.perf_counter_ns


class Stopwatch:
    """Nanoseconds by stage and step. The stages of a step's wall time that nobody claims are what is between them."""

    def __init__(self) -> None:
        """Of one engine, on the running event loop."""
        self.released = asyncio.Event()
        self.stages: defaultdict[str, list[int]] = defaultdict(list)
        self.committed_ns = 0
        self.launched_ns = 0
        self.num_writes = 0
        self.last_write_ns = 0
        self.delivered = asyncio.Event()
        self.num_expected = 0
        self._num_steps = 0
        self._done = asyncio.Event()

    async def run(self, num_steps: int) -> None:
        """Forget what was measured, and return when so many steps have been."""
        self.stages.clear()
        self._num_steps = num_steps
        self._done.clear()
        await self._done.wait()

    def planned(self, start_ns: int) -> None:
        """A plan has been made, which ends what is synchronous of the publishing before it."""
        if self.committed_ns:
            self.stages["publish"].append(start_ns - self.committed_ns)
        self.stages["plan"].append(now_ns() - start_ns)

    def written(self) -> None:
        """A request had bytes written."""
        self.num_writes += 1
        if self.num_writes >= self.num_expected:
            self.last_write_ns = now_ns()
            self.delivered.set()

    async def wait_until_delivered(self) -> None:
        """Return, after a turn of the event loop, when every request has had its bytes."""
        await asyncio.sleep(0)
        await self.delivered.wait()
        self.stages["deliver"].append(max(0, self.last_write_ns - self.launched_ns))

    def committed(self, start_ns: int) -> None:
        """A step was committed; its tokens are about to be published."""
        self.committed_ns = now_ns()
        self.stages["commit"].append(self.committed_ns - start_ns)
        if len(self.stages["commit"]) == self._num_steps:
            self._done.set()
        self.num_writes = 0
        self.delivered.clear()


def time_scheduler(scheduler: Any, watch: Stopwatch) -> None:
    """Time a scheduler's plans and commits. All else is asked of it directly, as in the server."""
    plan, commit = scheduler.plan, scheduler.commit

    def timed_plan(now: float) -> StepPlan | None:
        start_ns = now_ns()
        made = plan(now)
        watch.planned(start_ns)
        return made  # type: ignore[no-any-return]

    def timed_commit(result: StepResult, took_s: float) -> Any:
        start_ns = now_ns()
        step = commit(result, took_s)
        watch.committed(start_ns)
        return step

    scheduler.plan, scheduler.commit = timed_plan, timed_commit


class TimedFlight:
    """Lands when the step before has been delivered, where that is waited for."""

    def __init__(self, flight: Flight, watch: Stopwatch, *, waits: bool) -> None:
        self._flight = flight
        self._watch = watch
        self._waits = waits

    async def land(self) -> StepResult:
        """The flight's."""
        start_ns = now_ns()
        await self._watch.released.wait()
        if self._waits and self._watch.num_expected:
            await self._watch.wait_until_delivered()
        result = await self._flight.land()
        self._watch.stages["land"].append(now_ns() - start_ns)
        return result


class TimedRunner:
    """A Runner whose launches are timed. waits: its flights wait for the delivery of what landed before."""

    def __init__(self, runner: Runner, watch: Stopwatch, *, waits: bool) -> None:
        self._runner = runner
        self._watch = watch
        self._waits = waits
        self.close = runner.close
        self.recover = runner.recover

    def launch(self, plan: StepPlan) -> TimedFlight:
        """The runner's."""
        start_ns = now_ns()
        flight = self._runner.launch(plan)
        self._watch.launched_ns = now_ns()
        self._watch.stages["launch"].append(self._watch.launched_ns - start_ns)
        return TimedFlight(flight, self._watch, waits=self._waits)


class ScriptedFlight:
    """A step that has been computed."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    async def land(self) -> StepResult:
        """Yields once, like every flight."""
        await asyncio.sleep(0)
        return self._result


class ScriptedRunner:
    """Says the same words over and over, in every row alike."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids

    def launch(self, plan: StepPlan) -> ScriptedFlight:
        """The next word for each slice that samples."""
        token_id = self._token_ids[plan.step_id % len(self._token_ids)]
        return ScriptedFlight(StepResult(plan.step_id, (token_id,) * sum(piece.num_samples for piece in plan.slices)))

    def recover(self) -> ScriptedFlight:
        """Nothing fails."""
        return ScriptedFlight(StepResult(-1, ()))

    def close(self) -> None:
        """Nothing to give back."""


def scripted_loader(
    max_num_seqs: int,
    max_model_len: int,
    *,
    num_kv_tokens: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> Loader:
    """An engine without a model: the demonstration model's tokenizer, and a runner that says WORDS.

    num_kv_tokens: None has room for all sequences at their full length. max_num_batched_tokens: None lets them all
    begin in one step.
    """

    def load(report: Callable[[Progress], None]) -> EngineParts:
        tokenizer = Tokenizer.load(DEMO_FOLDER)
        chat_template = ChatTemplate.load(DEMO_FOLDER)
        chat_template.warm_up()
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=1 + -(-(num_kv_tokens or max_num_seqs * (max_model_len + BLOCK_SIZE)) // BLOCK_SIZE),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or max_num_seqs * NUM_PROMPT_TOKENS,
            watermark=0.0,
            enable_prefix_caching=True,
        )
        return EngineParts(
            info=ModelInfo(
                names=("scripted",),
                root="scripted",
                vocab_size=tokenizer.vocab_size,
                max_model_len=max_model_len,
                eos_ids=frozenset(),
                created_s=0,
            ),
            config=config,
            scheduler=Scheduler(
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                watermark=0.0,
            ),
            runner=ScriptedRunner(tokenizer.encode(WORDS)),
            tokenizer=tokenizer,
            chat_template=chat_template,
        )

    return load


def timed(load: Loader, watch: Stopwatch, *, waits: bool) -> Loader:
    """The same engine with a stopwatch around its scheduler and its runner."""

    def load_timed(report: Callable[[Progress], None]) -> EngineParts:
        parts = load(report)
        time_scheduler(parts.scheduler, watch)
        return replace(parts, runner=TimedRunner(parts.runner, watch, waits=waits))

    return load_timed


class Wire(asyncio.Transport):
    """A connection to a client that takes every byte at once. Keeps how many, and the last of them."""

    def __init__(self, connections: Connections, watch: Stopwatch, sock: socket.socket) -> None:
        addresses = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        super().__init__({"socket": sock, **addresses})
        self._watch = watch
        self._closing = False
        self.last = b""
        self.connection = Connection(connections)
        self.connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes have been handed over."""
        self.last = bytes(data)
        self._watch.written()

    def get_write_buffer_size(self) -> int:
        """Nothing is ever buffered."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""

    def is_closing(self) -> bool:
        """Whether either side has ended it."""
        return self._closing

    def resume_reading(self) -> None:
        """Reading never pauses."""

    def write_eof(self) -> None:
        """The server's last word: the client leaves too."""
        self.close()

    def close(self) -> None:
        """End it; the connection hears of it in the next turn of the loop."""
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close


def streamed_request(index: int, num_tokens: int) -> bytes:
    """A streaming completion of `num_tokens` tokens. No two prompts share a block."""
    prompt = [1 + index % 256, 1 + index // 256, *range(NUM_PROMPT_TOKENS - 2)]
    fields = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return (head % len(body)).encode() + body


async def measure(
    load: Loader, watch: Stopwatch, num_seqs: int, num_steps: int, num_warmup: int, num_viewers: int = 0
) -> Stages:
    """Microseconds by stage of at least `num_steps` steps in which `num_seqs` streams are written to.

    num_viewers: of the inspector's feed, who take all that it has to tell.
    """
    async with Engine(load) as engine, asyncio.TaskGroup() as tasks:
        viewers = [tasks.create_task(_look_on(engine)) for _ in range(num_viewers)]
        connections = Connections(create_app(engine), Limits(max_connections=num_seqs), tasks)
        sock = socket.socket()  # of all: only its family is looked at
        wires = [Wire(connections, watch, sock) for _ in range(num_seqs)]
        try:
            await _begin(engine, watch, wires, num_warmup + num_steps + NUM_SPARE_TOKENS)
            await watch.run(num_warmup)
            await watch.run(num_steps)
            return {name: [time_ns / 1000 for time_ns in times] for name, times in watch.stages.items()}
        finally:
            for viewer in viewers:
                viewer.cancel()
            watch.num_expected = 0
            watch.delivered.set()
            connections.abort()
            sock.close()


async def _begin(engine: Engine, watch: Stopwatch, wires: Sequence[Wire], num_tokens: int) -> None:
    """Send a request on each wire. Steps are held until all are there, so that none is far ahead of another."""
    for index, wire in enumerate(wires):
        wire.connection.data_received(streamed_request(index, num_tokens))
    await _until(lambda: engine.statistics().num_running + engine.statistics().num_waiting == len(wires))
    watch.released.set()
    await _until(lambda: all(b"data: " in wire.last for wire in wires))
    watch.num_expected = len(wires)
    watch.num_writes = len(wires)  # what landed last was delivered: waiting begins with the next step
    watch.delivered.set()


async def _look_on(engine: Engine) -> None:
    async for _ in followed(engine.observer, Feed(engine, None)):
        pass


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  what is looked at sets no event
        await asyncio.sleep(0)
