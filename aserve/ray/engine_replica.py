"""EngineReplica: one replica. An AsyncEngine in this process, create_app over it, and what Serve asks of a replica.

A plain class of coroutines: Serve makes it in a process of its own, and tests without Ray.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec
from prometheus_client import generate_latest

from aserve.cli.commands import application, end_loading, response_store, with_bounded_queue
from aserve.cli.flags import ServerOptions
from aserve.core.config import Options
from aserve.core.errors import UnavailableError
from aserve.engine import EngineState
from aserve.http import Keyring
from aserve.ray.carried import Carried, Head, Item, Tail, Whole
from aserve.ray.exchange import Exchange

DRAIN_S: Final = 30.0
_log = logging.getLogger(__name__)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is. state: of its engine. num_open: requests."""

    replica: str
    state: str
    num_open: int
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
        self._app = application(self.engine, given, keyring, self._store)
        self._entered = asyncio.Lock()

    async def enter(self) -> None:
        """Load the model. Raises `ConfigError` or `CheckpointError`."""
        async with self._entered:
            if self.engine.state is EngineState.NEW:
                await self.engine.__aenter__()
                end_loading()

    async def respond(self, carried: Carried, *_routing: Any) -> AsyncGenerator[Item]:
        """Answer a request, in pieces. What the router needed to know comes along, and is not needed here."""
        async with aclosing(Exchange(self._app, carried, self.name).items()) as items:
            async for item in items:
                yield item

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
        return Health(replica=self.name, state=self.engine.state.value, num_open=num_open, model_names=tuple(names))

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and its metrics as a text."""
        return self.name, generate_latest(self.engine.registry).decode()

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


__all__ = ["EngineReplica", "Health", "Mapping", "replace"]
