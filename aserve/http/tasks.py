"""A TaskGroup whose errors are those that its tasks raise, for code that has one thing to go wrong at a time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup`; what ends it comes out as itself, not in an ExceptionGroup. The first of several wins."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise group.exceptions[0]  # noqa: B904  a group of one explains nothing
