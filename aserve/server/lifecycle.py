"""A server's life: listen, load, serve, drain, leave.

    listen --> load ------> serve ------ signal --> delay --> drain --- all answered, or the deadline --> end --> exit 0
       |        |  '- fails: exit 1  |                 '---------'-- second signal: stop at once, exit 128 + its number
       '- fails '- signal: exit 0    '- the engine dies: say so, end, exit 70

The socket answers from the beginning; whether the model is there is the application's to say (/ready). In the delay
/ready says 503 and all else is as ever, so that those who send requests here can learn not to; who ends the process
with Ctrl-C is spared it. Draining, the listener is closed, the engine refuses new requests, and each connection ends
after its answer. What is not answered at the deadline is ended by the engine, so that every stream gets an error and
its proper end. An engine that dies (a bug of ours) has done so to its requests already: what is left is to write the
answers, and to leave it to whoever started the process to start another.

SIGHUP asks for files to be read again. But where standard input was a terminal that has been closed, it is the end, as
by SIGTERM, unless the process began with SIGHUP ignored, as nohup has it.

This is the only module that installs signal handlers, and that may end the process.
"""

import asyncio
import logging
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp

from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.faults import describe, report
from aserve.engine import Engine, EngineState
from aserve.http.doorman import Doorman
from aserve.http.tasks import task_group
from aserve.server.connection import Connection
from aserve.server.connections import Connections, Limits
from aserve.server.listener import Listener
from aserve.server.sockets import connection_limit
from aserve.server.throughput import log_throughput

_log = logging.getLogger(__name__)

END_GRACE_S: Final = 1.0
"""How long the last answers may take to be written, and the engine to close."""
STOP_GRACE_S: Final = 0.5
"""How long the engine may take to close when all has to stop at once."""
BACKSTOP_S: Final = 0.1
"""After the second signal the process ends by now, whatever is still going on: nothing is left to be saved."""
END_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))
"""SIGBREAK is Ctrl-Break on Windows, where nobody is sent SIGTERM."""
EXIT_DEAD: Final = 70
"""EX_SOFTWARE of sysexits.h: an internal error."""


def print_line(line: str) -> None:
    """Say something to whoever watches the terminal."""
    sys.stderr.write(f"{line}\n")  # at once: another thread may be writing too
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, and how long to take over things.

    uds: a path to listen on instead of host and port. tls: what connections are encrypted by, if they are.
    drain_delay_s: how long requests are still taken after SIGTERM, while /ready says 503.
    drain_timeout_s: how long those that are open get after that. tell_every_s: how often people hear how many they are.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls: ssl.SSLContext | None = None
    drain_delay_s: float = 0.0
    drain_timeout_s: float = 30.0
    tell_every_s: float = 5.0
    limits: Limits = field(default_factory=Limits)


class Server:
    """Serves an application, and the engine behind it, once.

    app: an ASGI application behind `aserve.http.middleware.guard`, as create_app makes it.
    on_ready: called with the server's URL once the engine is loaded. say: shows a line to people.
    on_hangup: what SIGHUP asks for, where no terminal was closed; it must not raise. None: a line, and nothing else.
    doorman: refuses what there is no room for before it is parsed; the application's, if nothing stands around it.
    """

    def __init__(
        self,
        engine: Engine,
        app: ASGIApp,
        config: ServerConfig,
        *,
        on_ready: Callable[[str], None] | None = None,
        say: Callable[[str], None] = print_line,
        on_hangup: Callable[[], None] | None = None,
        doorman: Doorman | None = None,
    ) -> None:
        self._engine = engine
        self._doorman = doorman
        self._app = app
        self._config = config
        self._on_ready = on_ready
        self._say = say
        self._on_hangup = on_hangup
        self._signals: list[int] = []
        self._asked = asyncio.Event()
        self._urged = asyncio.Event()
        self._url = ""
        self.left_behind = False
        """Whether a thread is still at work that cannot be interrupted: only the end of the process ends it."""

    @property
    def stopping(self) -> bool:
        """Whether `stop` has been called."""
        return self._asked.is_set()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the server to drain; asked again, it stops at once."""
        self._signals.append(signum)
        (self._asked if len(self._signals) == 1 else self._urged).set()

    def hang_up(self) -> None:
        """SIGHUP without the end of a terminal."""
        if self._on_hangup is None:
            self._say("aserve: SIGHUP: there is nothing to read again, as API keys are in no file")
        else:
            self._on_hangup()

    async def run(self) -> int:
        """Serve until stopped. Returns the exit code; raises only what a bug of ours raised."""
        try:
            async with task_group() as tasks:
                connections = Connections(self._app, self._config.limits, tasks, self._doorman)
                async with self._listening(connections) as listener:
                    return await self._live(listener, connections)
        except (ConfigError, CheckpointError) as error:
            self._say(f"aserve: {error.message}")
            return 1

    @asynccontextmanager
    async def _listening(self, connections: Connections) -> AsyncGenerator[Listener]:
        """Accept connections. Whatever happens, at the end none is left, and the engine is closed."""
        config = self._config
        place, tls = (config.host, config.port, config.uds), config.tls
        listener = await Listener.open(*place, lambda: Connection(connections), tls, config.limits.head_timeout_s)
        try:
            self._url = listener.url
            self._say(f"aserve: listening on {self._url}")
            yield listener
        finally:
            listener.close()
            connections.abort()
            await self._close_engine(STOP_GRACE_S)

    async def _live(self, listener: Listener, connections: Connections) -> int:
        if not await _finished(self._engine.__aenter__(), unless=self._asked):
            self.left_behind = True  # the thread that loads
            return 0
        if self._on_ready is not None:
            self._on_ready(self._url)
        async with _beside(log_throughput(self._engine)):
            if not await _finished(self._asked.wait(), unless=self._engine.died):
                listener.close()
                await self._end_dead(connections)
                return EXIT_DEAD
            departed = await _finished(self._depart(listener, connections), unless=self._urged)
            return 0 if departed else 128 + self._signals[-1]

    async def _depart(self, listener: Listener, connections: Connections) -> None:
        """Let it be known that the server is leaving, then take no more, and finish what is open."""
        await connections.announce_end()
        delay_s = 0.0 if self._signals[0] == signal.SIGINT else self._config.drain_delay_s
        if delay_s > 0.0:
            self._say(f"aserve: unready; requests are taken for {delay_s:g} s more; signal again to stop at once")
            await _finished(asyncio.sleep(delay_s), unless=self._engine.died)
        await listener.shut()
        await self._drain(connections)
        await self._close_engine(END_GRACE_S)
        await self._end(connections)

    async def _drain(self, connections: Connections) -> None:
        timeout_s = self._config.drain_timeout_s
        if connections.num_busy > 0:
            self._say(
                f"aserve: finishing {_requests(connections)}; {timeout_s:g} s at most, "
                f"{'Ctrl-C' if self._signals[0] == signal.SIGINT else 'signal'} again to stop at once"
            )
        try:
            async with asyncio.timeout(timeout_s), _beside(self._tell_open(connections)):
                await asyncio.gather(self._engine.drain(timeout_s), connections.drain())
        except TimeoutError:
            self._say(f"aserve: ending {_requests(connections)} that took longer than {timeout_s:g} s")

    async def _tell_open(self, connections: Connections) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._config.drain_timeout_s
        while True:
            await asyncio.sleep(self._config.tell_every_s)
            self._say(f"aserve: {_requests(connections)} still open; {max(0.0, end_s - clock()):.0f} s left")

    async def _end_dead(self, connections: Connections) -> None:
        """The engine has died: say what of, and let the errors that its requests got be written."""
        failure = self._engine.failure
        name = type(failure).__name__
        _log.critical("the engine died of %s", name if failure is None else describe(failure))
        self._say(f"aserve: the engine died ({name}, see above); the server ends with exit code {EXIT_DEAD}")
        await self._end(connections)

    async def _end(self, connections: Connections) -> None:
        """Let what has been written to the connections be taken, and close them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S):
                await connections.drain()
                await connections.close()

    async def _close_engine(self, grace_s: float) -> None:
        is_dead = self._engine.state is EngineState.DEAD  # what `aclose` would raise then has been told
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(self._engine.aclose(), return_exceptions=is_dead)
        except TimeoutError:
            self.left_behind = True  # the thread of a step


def _requests(connections: Connections) -> str:
    return f"{connections.num_busy} request{'s' if connections.num_busy != 1 else ''}"


async def _finished(work: Coroutine[Any, Any, object], *, unless: asyncio.Event) -> bool:
    """Run `work` to its end; or, if the event comes first, cancel it and return False. Raises what `work` raises."""
    working = asyncio.create_task(work)
    interrupt = asyncio.create_task(unless.wait())
    try:
        await asyncio.wait({working, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        working.cancel()
        interrupt.cancel()
        await asyncio.gather(working, interrupt, return_exceptions=True)


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run `work` for as long as the block runs. What it raises is a line in the log."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            report(_log, "telling how the server does", outcome)


async def run_until_signal(server: Server) -> int:
    """Run a server until SIGTERM, SIGINT or the end of its terminal, in the main thread of a process that is about this
    server alone.
    """
    loop = asyncio.get_running_loop()

    def received(signum: int) -> None:
        if server.stopping:
            backstop = threading.Timer(BACKSTOP_S, os._exit, [128 + signum])
            backstop.daemon = True
            backstop.start()
        server.stop(signum)

    def failed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("the event loop met %s", context["message"] if error is None else describe(error))

    loop.set_exception_handler(failed)
    handlers: dict[int, Callable[[], None]] = {each: partial(received, each) for each in END_SIGNALS}
    if hasattr(signal, "SIGHUP"):
        minds_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        handlers[signal.SIGHUP] = partial(_hung_up, server, minds_terminal=minds_terminal)
    with _handling(loop, handlers):
        return await server.run()


def _hung_up(server: Server, *, minds_terminal: bool) -> None:
    if not minds_terminal or _has_terminal():
        server.hang_up()
    elif not server.stopping:  # the shell and the kernel may both send it, and urge nobody
        server.stop(signal.SIGHUP)


def _has_terminal() -> bool:
    """Whether standard input is a terminal that is there: one that was closed is none."""
    return os.isatty(0)


@contextmanager
def _handling(loop: asyncio.AbstractEventLoop, handlers: Mapping[int, Callable[[], None]]) -> Generator[None]:
    """Have the loop call the handlers of signals, for as long as the block runs."""
    with ExitStack() as stack:
        for signum, handler in handlers.items():
            try:
                loop.add_signal_handler(signum, handler)
                stack.callback(loop.remove_signal_handler, signum)
            except NotImplementedError:  # Windows: Python calls in the main thread, and wakes the loop
                earlier = signal.signal(signum, partial(_hand_over, loop, handler))
                stack.callback(signal.signal, signum, earlier)
        yield


def _hand_over(loop: asyncio.AbstractEventLoop, handler: Callable[[], None], _signum: int, _frame: object) -> None:
    loop.call_soon_threadsafe(handler)


def run(
    engine: Engine,
    app: ASGIApp,
    config: ServerConfig | None = None,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    say: Callable[[str], None] = print_line,
    doorman: Doorman | None = None,
) -> int:
    """Load the engine and serve the application until SIGTERM, SIGINT or the end of its terminal; see `Server`.

    config: its limit of connections is replaced by what the process can hold.

    Returns the exit code: 0 after draining, 1 if the address or the model cannot be had (one line says why), 70 if the
    engine died. Does not return but ends the process if a thread is left that cannot be interrupted: one that loads, or
    computes a step.
    """
    config = config or ServerConfig()
    config = replace(config, limits=replace(config.limits, max_connections=connection_limit()))
    server = Server(engine, app, config, on_ready=on_ready, say=say, on_hangup=on_hangup, doorman=doorman)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(run_until_signal(server))
        if server.left_behind:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed (it is not made for Windows), else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
