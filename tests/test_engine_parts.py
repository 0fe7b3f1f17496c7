"""What an engine is built of is given back, whether it was used or not, and whoever may still be at work."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aserve.engine_parts import EngineParts, close_unwanted


class Noted:
    """Parts that note what is closed, and in which thread. may_end: until then the runner's end takes."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.may_end = threading.Event()
        self.may_end.set()
        self.has_ended = threading.Event()
        runner: Any = SimpleNamespace(close=self.close_runner)
        adapters: Any = SimpleNamespace(close=lambda: self.closed.append("adapters"))
        no: Any = None
        self.parts = EngineParts(no, no, no, runner, no, no, adapters, self.close_others)

    def close_others(self) -> None:
        self.closed.append("others")
        self.threads.add(threading.current_thread())

    def close_runner(self) -> None:
        self.threads.add(threading.current_thread())
        self.may_end.wait(60)
        self.closed.append("runner")
        self.has_ended.set()


async def test_all_is_given_back_before_it_is_over_and_the_event_loop_goes_on():
    noted = Noted()
    await noted.parts.close(is_stuck=False)
    assert noted.closed == ["adapters", "others", "runner"]
    assert threading.current_thread() not in noted.threads


async def test_nobody_waits_for_a_runner_that_is_stuck():
    noted = Noted()
    noted.may_end.clear()
    await noted.parts.close(is_stuck=True)
    assert noted.closed == ["adapters", "others"]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "aserve close")
    noted.may_end.set()
    assert await asyncio.to_thread(noted.has_ended.wait, 60)
    assert noted.closed[-1] == "runner"


@pytest.mark.parametrize("outcome", ["loaded", "failed", "cancelled"])
async def test_what_was_loaded_for_nobody_is_given_back(outcome):
    noted = Noted()
    loading: asyncio.Future[EngineParts] = asyncio.get_running_loop().create_future()
    if outcome == "loaded":
        loading.set_result(noted.parts)
    elif outcome == "failed":
        loading.set_exception(MemoryError())
    else:
        loading.cancel()
    close_unwanted(loading)
    assert noted.closed == (["runner", "others"] if outcome == "loaded" else [])
