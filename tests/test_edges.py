"""Edges: what a task of a group is told of a cancellation that nobody asked for."""

import asyncio
import logging

import pytest

from aserve.core.faults import WISHES
from aserve.edges import aside, heard


async def cancelled_elsewhere():
    raise asyncio.CancelledError


async def test_a_cancellation_from_elsewhere_ends_the_group():
    """Catches work that counts as done because it raised a CancelledError: a group passes over it."""
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(heard(cancelled_elsewhere()))
    assert [type(error) for error in caught.value.exceptions] == [RuntimeError]


async def test_a_tasks_own_cancellation_stays_one():
    task = asyncio.create_task(heard(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_what_it_comes_to_is_handed_on():
    assert await heard(asyncio.sleep(0, "done")) == "done"


def test_what_nobodys_answer_depends_on_may_fail_and_may_not_keep_a_process_from_its_end(caplog):
    def fail(error):
        raise error

    log = logging.getLogger("aserve.tests")
    for error in (ValueError("no"), MemoryError(), asyncio.CancelledError()):
        aside(log, "a place", "a request", fail, error)
    assert [record.name for record in caplog.records] == ["aserve.tests"] * 3
    for wish in WISHES:
        with pytest.raises(wish):
            aside(log, "a place", None, fail, wish())
