"""Clients that ask for a long stream and never read: when they are cut, what they hold, and what others feel of it."""

import asyncio
import json
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from aserve.http import create_app
from aserve.server.connection import Connection
from aserve.server.connections import Connections
from aserve.server.writing import WRITE_BUFFER_BYTES
from tests.engines import scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.server.wire import request, serving, until

NUM_TOKENS = 2_000
"""Some 450 KB of events: more than all buffers between a stream and a client that does not read."""
MAX_BYTES = 256 * 1024
"""What a stalled stream may hold in this process."""


def stream_of(num_tokens: int) -> bytes:
    body = {"prompt": "go on", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    return request(b"/v1/completions", b"POST", b"Content-Type: application/json", body=json.dumps(body).encode())


class Stall(NamedTuple):
    """What a connection had not sent when it was cut, and for how long it had not been able to."""

    unsent_bytes: int
    lasted_s: float


class Observed(Connection):
    """Notes how it stalled."""

    def __init__(self, stalls: list[Stall], connections: Connections) -> None:
        super().__init__(connections)
        self._stalls = stalls
        self._stalled_at_s: float | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_at_s = self._loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_at_s = None

    def abort(self, *, cancel: bool = False) -> None:
        if self._stalled_at_s is not None and not self._lost.is_set():
            lasted_s = self._loop.time() - self._stalled_at_s
            self._stalls.append(Stall(self._transport.get_write_buffer_size(), lasted_s))
            self._stalled_at_s = None
        super().abort(cancel=cancel)


class Forgetful(ScriptedRunner):
    """Keeps none of its plans, which would be counted as what streams hold."""

    def launch(self, plan):
        self.plans.clear()
        return super().launch(plan)


async def deaf_client(port: int) -> socket.socket:
    """A client that has asked, and will never read."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, stream_of(NUM_TOKENS))
    return client


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize(("num_deaf", "send_timeout_s"), [(3, 0.2), pytest.param(200, 2.0, marks=pytest.mark.thorough)])
async def test_readers_who_never_read_are_cut_and_hold_little(num_deaf: int, send_timeout_s: float):
    stalls: list[Stall] = []
    num_seqs = num_deaf + 1
    engine = scripted_engine(
        runner=Forgetful(model=FakeScript(b"a")),
        max_model_len=NUM_TOKENS + 64,
        num_blocks=num_seqs * (NUM_TOKENS // 8 + 16),
        max_num_seqs=num_seqs,
    )
    protocol = partial(Observed, stalls)
    async with engine, serving(create_app(engine), protocol, send_timeout_s=send_timeout_s) as site:
        with ExitStack() as stack:
            before = peak = resident_bytes()
            for _ in range(num_deaf):
                stack.enter_context(await deaf_client(site.port))
            await until(lambda: len(site.connections) == num_deaf)
            reader = await site.connect()
            await reader.send(stream_of(100))
            async with asyncio.timeout(200):
                assert await reader.reader.readuntil(b"data: [DONE]\n\n")
                while len(site.connections) > 1:  # the reader's
                    peak = max(peak, resident_bytes())
                    await asyncio.sleep(0.05)
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
    assert len(stalls) == num_deaf, "buffers were filled, and whoever filled them was cut"
    assert max(stall.unsent_bytes for stall in stalls) <= WRITE_BUFFER_BYTES + MAX_BYTES
    lasted_s = [stall.lasted_s for stall in stalls]
    assert send_timeout_s * 0.9 < min(lasted_s) <= max(lasted_s) < send_timeout_s + 30.0
    held = (peak - before) // num_deaf
    print(f"{num_deaf} readers cut {min(lasted_s):.2f} to {max(lasted_s):.2f} s after they stalled; {held} bytes each")
    if num_deaf >= 100:  # what the process itself grows by is spread over them
        assert held <= MAX_BYTES
