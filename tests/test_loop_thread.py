"""LoopThread: how it ends, beside what test_llm.py asks of it."""

import asyncio
import os
import signal
import threading

import pytest

from aserve.core.errors import UnavailableError
from aserve.loop_thread import LoopThread


def test_closing_starts_no_thread(monkeypatch):
    """From Python 3.12 on none can be started while the interpreter ends, which is when a forgotten one is closed."""
    thread = LoopThread("loop")
    assert thread.run(asyncio.to_thread(int)) == 0  # the executor has a thread now
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self)))
    thread.close()
    assert started == []


def test_closing_cancels_what_runs_and_waits_for_its_threads():
    ended = []

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def begin():
        asyncio.get_running_loop().run_in_executor(None, lambda: (release.wait(), ended.append("thread")))
        task = asyncio.create_task(wait_for_ever())
        await asyncio.sleep(0)
        return task

    release = threading.Event()
    thread = LoopThread("loop")
    task = thread.run(begin())
    threading.Timer(0.05, release.set).start()
    thread.close()
    assert task.cancelled()
    assert ended == ["task", "thread"]


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_an_interrupt_while_a_call_is_handed_over_leaves_nothing_running(monkeypatch, is_scheduled: bool):
    """The fault: requests of a call that Ctrl-C had ended ran on, unseen, to their last token."""
    ended = []

    async def wait_for_ever():
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    def interrupted(callback):
        monkeypatch.undo()
        if is_scheduled:
            thread._loop.call_soon_threadsafe(callback)
            runs.wait()
        raise KeyboardInterrupt

    runs, thread = threading.Event(), LoopThread("loop")
    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(wait_for_ever())
    assert ended == ["task"] * is_scheduled
    assert thread.run(asyncio.sleep(0, "next")) == "next"
    thread.close()


def test_a_loop_that_cannot_be_had_is_told_and_not_waited_for(monkeypatch):
    """Such as where no file descriptor is left."""

    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", fail)
    with pytest.raises(OSError, match="Too many open files"):
        LoopThread("loop")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's own, to whoever forks beside threads
def test_in_a_forked_process_it_refuses_and_has_nothing_to_close():
    thread = LoopThread("loop")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            with pytest.raises(UnavailableError, match="make its own"):
                thread.run(asyncio.sleep(0))
            thread.close()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert thread.run(asyncio.to_thread(int)) == 0
    thread.close()
