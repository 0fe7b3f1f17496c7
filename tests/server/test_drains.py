"""Drains at random moments: nothing that was begun is cut short, and the exit code is 0."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import pytest

from aserve.http import create_app
from aserve.server import Server, ServerConfig
from tests.engines import says, scripted_engine
from tests.server.wire import Client, request, until

ANSWER = "some words that take a while to be said"


def asking(*, stream: bool) -> bytes:
    body = json.dumps({"prompt": "go on", "max_tokens": 60, "stream": stream}).encode()
    return request(b"/v1/completions", b"POST", b"Content-Type: application/json", body=body)


def is_whole_stream(text: bytes) -> bool:
    """Whether all of the answer came, and the stream's end."""
    *events, done, end = text.split(b"\n\n")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    said = "".join(choice["text"] for choice in choices)
    return (said, choices[-1]["finish_reason"], done, end) == (ANSWER, "stop", b"data: [DONE]", b"")


class Trial:
    """A server with some clients, each of whom is somewhere in a request when the signal comes."""

    def __init__(self, rng: random.Random, port: int) -> None:
        self._rng = rng
        self._port = port
        self.num_whole = 0
        self.num_refused = 0

    async def visit(self, pause: int, *, stream: bool) -> None:
        """Ask, once or over and over on one connection, in two pieces; what is answered is whole, or a 503."""
        try:
            client = await Client.connect(self._port)
        except OSError:
            return  # the listener is closed
        data = asking(stream=stream)
        try:
            for _ in range(self._rng.randint(1, 4)):
                split = self._rng.randrange(len(data) + 1)
                try:
                    await client.send(data[:split])
                    await turns(pause)
                    await client.send(data[split:])
                except (ConnectionError, RuntimeError):
                    return  # closed between two requests, or within the head of one
                if not await self._read(client, stream=stream):
                    return
        finally:
            await client.close()

    async def _read(self, client: Client, *, stream: bool) -> bool:
        """Whether an answer came, and the connection goes on."""
        try:
            answer = await client.head()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            partial = getattr(error, "partial", b"")
            assert partial == b"", "an answer that has begun is not cut"
            return False
        if answer.status == 503:
            assert answer.headers["retry-after"]
            self.num_refused += 1
            return False
        assert answer.status == 200
        if stream:
            assert is_whole_stream(await client.chunks())
        else:
            body = await client.reader.readexactly(int(answer.headers["content-length"]))
            assert json.loads(body)["choices"][0]["text"] == ANSWER
        self.num_whole += 1
        return answer.headers.get("connection") != "close"


async def turns(num: int) -> None:
    """Let the loop turn so many times."""
    for _ in range(num):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(rng: random.Random):
    lines: list[str] = []
    ready = asyncio.Event()
    engine = scripted_engine(says(ANSWER), max_num_seqs=4)
    delay_s = rng.choice((0.0, 0.005))
    server = Server(
        engine,
        create_app(engine),
        ServerConfig(port=0, drain_delay_s=delay_s),
        on_ready=lambda _: ready.set(),
        say=lines.append,
    )
    task = asyncio.create_task(server.run())
    await until(ready.is_set)
    yield server, int(lines[0].rpartition(":")[2]), task


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 210), marks=pytest.mark.thorough)], ids=len)
async def test_drains_at_random_moments(seeds):
    num_whole = num_refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        async with serving(rng) as (server, port, task):
            trial = Trial(rng, port)
            async with asyncio.TaskGroup() as visits:
                for _ in range(8):
                    visits.create_task(trial.visit(rng.randrange(30), stream=rng.random() < 0.7))
                await turns(rng.randrange(300))
                server.stop()
            async with asyncio.timeout(60):
                assert await task == 0, f"seed {seed}"
        num_whole += trial.num_whole
        num_refused += trial.num_refused
    print(f"{len(seeds)} drains: {num_whole} answers whole, {num_refused} refused, none cut")
    assert num_whole > 0
    assert num_refused > 0
