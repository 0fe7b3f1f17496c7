"""Structures are compiled in threads, some at once, each within its time; what is late keeps its turn to the end."""

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from aserve import structures
from aserve.core.config import ModelInfo
from aserve.core.errors import InvalidRequestError, OverloadedError
from aserve.core.ports import Structure
from aserve.core.structured import StructuredOutputs
from aserve.structures import AT_ONCE, Structures
from aserve.workers import Workers
from tests.engines import EOS, VOCAB_SIZE, byte_tokenizer
from tests.fakes import FakeStructure

INFO = ModelInfo(names=("m",), root="m", vocab_size=VOCAB_SIZE, max_model_len=64, eos_ids=frozenset({EOS}), created_s=0)
JSON = StructuredOutputs(json_object=True)


class SlowStructures(Structures):
    """Compiles when it is let."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(byte_tokenizer(), INFO, workers)
        self.may_end = threading.Event()
        self.threads: list[str] = []

    def compile(self, structured: StructuredOutputs) -> Structure:
        self.threads.append(threading.current_thread().name)
        self.may_end.wait(60)
        return FakeStructure(lambda _said: ())


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "COMPILE_S", 0.05)


async def test_a_structure_comes_from_a_thread_of_the_texts(workers: Workers) -> None:
    slow = SlowStructures(workers)
    slow.may_end.set()
    assert (await slow.compiled(JSON)).constraint().num_tokens == 0
    assert slow.threads[0].startswith("aserve-worker")


async def test_a_structure_of_the_library_is_compiled(workers: Workers) -> None:
    made = await Structures(byte_tokenizer(), INFO, workers).compiled(StructuredOutputs(choice=("a", "b")))
    mask = made.constraint().masks()
    assert [i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1] == [97, 98]


async def test_what_takes_too_long_is_a_400_and_has_its_turn_until_it_is_done(workers: Workers, short: None) -> None:
    """Else any number of them could be under way at once."""
    slow = SlowStructures(workers)
    late = await asyncio.gather(*(slow.compiled(JSON) for _ in range(AT_ONCE)), return_exceptions=True)
    assert [type(error) for error in late] == [InvalidRequestError] * AT_ONCE
    assert "takes more than 0.05 s to compile" in str(late[0])
    for _ in range(2):  # who got no turn leaves none behind
        with pytest.raises(OverloadedError, match="other structures"):
            await slow.compiled(JSON)
    assert len(slow.threads) == AT_ONCE
    slow.may_end.set()
    while True:  # the turns come back through the event loop
        try:
            await slow.compiled(JSON)
            break
        except OverloadedError:
            await asyncio.sleep(0.01)


async def test_of_one_that_fails_when_nobody_waits_for_it_the_log_says_nothing(workers: Workers, short: None) -> None:
    """Its client was told that it takes too long."""

    class Failing(SlowStructures):
        def compile(self, structured: StructuredOutputs) -> Structure:
            super().compile(structured)
            raise InvalidRequestError("no such structure", "structured")

    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
    failing = Failing(workers)
    late = await asyncio.gather(*(failing.compiled(JSON) for _ in range(AT_ONCE)), return_exceptions=True)
    assert "takes more than" in str(late.pop(0))
    late.clear()  # with the frames of their tracebacks
    failing.may_end.set()
    while True:  # the turns come back through the event loop
        try:
            await failing.compiled(JSON)
        except OverloadedError:
            await asyncio.sleep(0)
        except InvalidRequestError:
            break
    gc.collect()
    assert not unheard


async def test_a_structure_that_finds_no_thread_is_not_to_blame(short: None) -> None:
    workers = Workers(num_threads=1)
    slow, busy = SlowStructures(workers), threading.Event()
    held = asyncio.create_task(workers.run(busy.wait, 60))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="no thread is free"):
        await slow.compiled(JSON)
    busy.set()
    slow.may_end.set()
    await held
    workers.close()


async def test_who_leaves_leaves_the_turn_to_the_next(workers: Workers) -> None:
    slow = SlowStructures(workers)
    gone = [asyncio.create_task(slow.compiled(JSON)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.05)  # whether they have begun or wait for a thread, their turns are taken
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    slow.may_end.set()
    assert await asyncio.wait_for(slow.compiled(JSON), 60)


@pytest.mark.parametrize("num_looks", range(5))
async def test_who_leaves_as_its_turn_comes_leaves_it_to_the_next(workers: Workers, num_looks: int) -> None:
    """The event loop looks at whoever comes a few times until it has its turn and sees that it has it."""
    slow = SlowStructures(workers)
    slow.may_end.set()
    gone = [asyncio.create_task(slow.compiled(JSON)) for _ in range(AT_ONCE)]
    for _ in range(num_looks):
        await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert await slow.compiled(JSON)
