"""EngineReplica: one replica. An AsyncEngine in this process, create_app over it, and what Serve asks of a replica.

A plain class of coroutines: Serve makes it in a process of its own, and tests without Ray.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec
from prometheus_client import generate_latest

from aserve.cli.commands import application, end_loading, response_store, with_bounded_queue
from aserve.cli.flags import ServerOptions
from aserve.core.config import Options
from aserve.core.errors import UnavailableError
from aserve.engine import EngineState
from aserve.http import Keyring
from aserve.http.replica import Replica
from aserve.ray.carried import Carried, Head, Item, Tail, Whole
from aserve.ray.exchange import Exchange
from aserve.routing import ReplicaReport

SENT_S: Final = 2.0
"""How long the last pieces may take to get to the ingress."""
_log = logging.getLogger(__name__)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is. state: of its engine. num_open: requests. pid: of its process, on its node."""

    replica: str
    state: str
    num_open: int
    pid: int
    model_names: tuple[str, ...] = ()


class EngineReplica:
    """options: of the engine. given: of the application. name: what the replica is called, where Serve does not say."""

    def __init__(self, options: Options, given: ServerOptions, name: str = "") -> None:
        from aserve.build import AsyncEngine

        self.name = name or replica_name()
        self.engine = AsyncEngine.from_options(with_bounded_queue(options))
        self._given = given
        keyring = Keyring(given.api_key, path=given.api_keys_file, tenants=self.engine.tenants)
        self._store = response_store(given)
        self._replica = Replica(self.engine)
        self._app = application(self.engine, given, keyring, self._store, self._replica)
        self._is_leaving = False
        self._num_responding = 0
        self._all_taken = asyncio.Event()

    async def enter(self) -> None:
        """Load the model. Raises `ConfigError` or `CheckpointError`."""
        await self.engine.__aenter__()
        end_loading()

    async def respond(self, carried: Carried, *_routing: Any) -> AsyncGenerator[Item]:
        """Answer a request, in pieces. What the router needed to know comes along, and is not needed here."""
        self._num_responding += 1
        try:
            async with aclosing(Exchange(self._app, carried, self.name).items()) as items:
                async for item in items:
                    yield item
        finally:
            self._num_responding -= 1
            if self._num_responding == 0:
                self._all_taken.set()

    async def answer(self, carried: Carried) -> Whole:
        """Answer a request that is asked of all replicas, whole."""
        head, pieces = Head(500, (), self.name), []
        async with aclosing(Exchange(self._app, carried, self.name).items()) as items:
            async for item in items:
                if isinstance(item, Head):
                    head = item
                elif not isinstance(item, Tail):
                    pieces.append(item)
        return Whole(head.status, head.headers, self.name, b"".join(pieces))

    async def health(self) -> Health:
        """For /health and /ready of the whole."""
        num_open = sum(usage.num_open for usage in self.engine.tenants.usages())
        names = self.engine.info.names if self.engine.state is EngineState.READY else ()
        state = self.engine.state.value
        return Health(replica=self.name, state=state, num_open=num_open, pid=os.getpid(), model_names=tuple(names))

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and its metrics as a text."""
        return self.name, generate_latest(self.engine.registry).decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        """For whoever routes: what is cached here and what waits; nothing while there is no model."""
        report = self.report()
        return {} if report is None else report.to_dict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For who decides how many replicas there are."""
        report = self.report()
        return {} if report is None else report.load().to_stats()

    def report(self) -> ReplicaReport | None:
        """What the replica tells of itself; None while it takes no requests."""
        try:
            return self._replica.report() if self.engine.state is EngineState.READY else None
        except UnavailableError:
            return None

    async def leave(self, end: Callable[[], None]) -> None:
        """Take no more, finish what is open for as long as that may take, and `end`."""
        if self._is_leaving:
            return
        self._is_leaving = True
        _log.warning("replica %s: asked to end; open requests are finished", self.name)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._given.shutdown_timeout):
                await self.engine.drain(self._given.shutdown_timeout)
                while self._num_responding:  # what is computed has to be taken, too
                    self._all_taken.clear()
                    await self._all_taken.wait()
        await asyncio.sleep(SENT_S)
        end()

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        if self.engine.state in (EngineState.DEAD, EngineState.CLOSED):
            raise UnavailableError(f"the engine is {self.engine.state.value}")

    async def __del__(self) -> None:
        """Serve awaits this when all requests have ended, or their time is over."""
        await self.close()

    async def close(self) -> None:
        """End what is open and give back the memory."""
        await self.engine.aclose()
        self._app.state.batches.store.close()
        self._store.close()


def replica_name() -> str:
    """What Serve calls the replica of this process; "" outside of Serve."""
    from ray import serve

    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except Exception:  # outside of Serve
        return ""
