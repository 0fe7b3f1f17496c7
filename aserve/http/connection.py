"""The client at the other end: whether it is still there. Knows ASGI's `receive` and nothing of what is being answered.

Work for a client is done inside `while_connected`, which cancels it as soon as the client leaves; whatever the work
holds, it gives back on its way out. This is the one reader of `receive` once the body has been read.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Receive

from aserve.http.tasks import task_group


class ClientGone(Exception):
    """The client left, or stopped reading: there is nobody to answer."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncGenerator[None]:
    """Run the block; when the client leaves, cancel it and go on. A `ClientGone` from the block does as much."""
    try:
        async with task_group() as tasks:
            watch = tasks.create_task(_watch(receive), name="aserve: is the client there")
            yield
            watch.cancel()
    except ClientGone:
        pass


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
