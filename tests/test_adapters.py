"""The registry of adapters: what is in memory, who waits for place, and where folders may lie."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from aserve.adapters import Adapters
from aserve.core.errors import AdapterError, ModelNotFoundError, OverloadedError, UnavailableError
from aserve.core.ids import AdapterId
from aserve.core.request import Terms


class FakeStore:
    """An `AdapterStore` that remembers what is in it, and may be held up, or asked to fail."""

    def __init__(self) -> None:
        self.held: dict[AdapterId, str] = {}
        self.most = 0
        self.num_reads = 0
        self.may_read = threading.Event()
        self.may_read.set()
        self.bad: set[str] = set()
        self.faults: list[BaseException] = []
        """What the next readings raise that is no fault of a folder."""

    def load(self, adapter: AdapterId, folder: str) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would wait"
        self.num_reads += 1
        self.may_read.wait(10)
        if self.faults:
            raise self.faults.pop()
        if Path(folder).name in self.bad:
            raise AdapterError(f"{folder} is bad")
        self.held[adapter] = Path(folder).name
        self.most = max(self.most, len(self.held))

    def drop(self, adapter: AdapterId) -> None:
        del self.held[adapter]


def terms(name: str | None) -> Terms:
    return Terms(arrival_s=0.0, lora=name)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def adapters(store: FakeStore, tmp_path: Path):
    """Place for two; a, b, c and d are known."""
    made = Adapters(store, max_loaded=2, root=str(tmp_path), taken=("base",))
    for name in "abcd":
        (tmp_path / name).mkdir()
        await made.add(name, name)
    yield made
    made.close()


async def names_in_memory(store: FakeStore) -> list[str]:
    await asyncio.sleep(0)
    return sorted(store.held.values())


async def test_the_least_recently_used_makes_place(adapters: Adapters, store: FakeStore) -> None:
    assert await names_in_memory(store) == ["c", "d"]
    async with adapters.using(terms("c")):
        pass
    async with adapters.using(terms("a")) as settled:
        assert settled.adapter is not None
        assert store.held[settled.adapter] == "a"
    assert await names_in_memory(store) == ["a", "c"]
    assert store.most == 2


async def test_those_in_memory_are_named_by_their_ids(adapters: Adapters, store: FakeStore) -> None:
    assert adapters.names() == store.held
    assert sorted(adapters.names().values()) == ["c", "d"]
    adapters.remove("c")
    assert list(adapters.names().values()) == ["d"]


async def test_each_reading_has_an_id_of_its_own(adapters: Adapters) -> None:
    """What was computed with the files as they were must not be found with others in their place."""
    ids = []
    for name in ("a", "b", "c", "a"):
        async with adapters.using(terms(name)) as settled:
            ids.append(settled.adapter)
    assert len(set(ids)) == 4
    async with adapters.using(terms("a")) as settled:
        assert settled.adapter == ids[-1]


async def test_without_an_adapter_there_is_nothing_to_wait_for(adapters: Adapters, store: FakeStore) -> None:
    store.may_read.clear()
    async with adapters.using(terms(None)) as settled:
        assert settled.adapter is None
    store.may_read.set()


async def test_whoever_finds_no_place_waits_until_somebody_has_ended(adapters: Adapters, store: FakeStore) -> None:
    async with AsyncExitStack() as stack:
        for name in "ab":
            await stack.enter_async_context(adapters.using(terms(name)))

        async def use(name: str) -> None:
            async with adapters.using(terms(name)):
                await asyncio.sleep(0.01)

        waiting = [asyncio.create_task(use(name)) for name in "cdc"]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert await names_in_memory(store) == ["a", "b"]
    await asyncio.gather(*waiting)
    assert store.most == 2


async def test_for_ever_nobody_waits(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.adapters.PLACE_S", 0.01)
    async with adapters.using(terms("a")), adapters.using(terms("b")):
        with pytest.raises(OverloadedError, match="2 adapters are in use"):
            async with adapters.using(terms("c")):
                pass
    async with adapters.using(terms("c")):
        pass


@pytest.mark.parametrize("has_left", [False, True])
async def test_who_gives_up_as_a_place_comes_free_passes_it_on(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, *, has_left: bool
) -> None:
    """Catches the one wake-up for a place lost with a reading whose time is up in the same turn of the loop.

    has_left: nobody wants what is read then any more.
    """
    patiences: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def noted(delay_s: float | None) -> asyncio.Timeout:
        patiences.append(timeout(delay_s))
        return patiences[-1]

    async def use(name: str) -> None:
        async with adapters.using(terms(name)):
            pass

    async def waiting(name: str) -> asyncio.Task[None]:
        num_before = len(adapters._waiters)
        task = asyncio.create_task(use(name))
        while len(adapters._waiters) == num_before:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0)
        return task

    async with adapters.using(terms("a")):
        async with adapters.using(terms("b")):
            with monkeypatch.context() as patch:
                patch.setattr("aserve.adapters.asyncio.timeout", noted)
                first = await waiting("c")
            if has_left:
                first.cancel()
                await asyncio.wait([first])
                await asyncio.sleep(0)
            second = await waiting("d")
            patiences[0].reschedule(asyncio.get_running_loop().time())
        async with timeout(1):
            with pytest.raises(asyncio.CancelledError if has_left else OverloadedError):
                await first
            await second


async def test_many_who_want_one_have_it_read_once(adapters: Adapters, store: FakeStore) -> None:
    num_reads = store.num_reads
    store.may_read.clear()

    async def use() -> None:
        async with adapters.using(terms("a")):
            pass

    tasks = [asyncio.create_task(use()) for _ in range(5)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()  # who came first leaves, and the others get it all the same
    store.may_read.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, *[type(None)] * 4]
    assert store.num_reads == num_reads + 1


@pytest.mark.parametrize("fault", [RuntimeError, StopIteration, asyncio.CancelledError])
async def test_a_fault_while_one_is_read_ends_who_came_first_alone(
    adapters: Adapters, store: FakeStore, fault: type[BaseException]
) -> None:
    """Catches a future that refuses what was raised, and all who want an adapter ended by one reading of it."""
    store.may_read.clear()
    num_before = store.num_reads

    async def use() -> str:
        async with adapters.using(terms("a")) as settled:
            assert settled.adapter is not None
            return store.held[settled.adapter]

    tasks = [asyncio.create_task(use()) for _ in range(3)]
    await until_waiting(adapters, 3)
    store.faults.append(fault())
    store.may_read.set()
    async with asyncio.timeout(10):
        first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, RuntimeError if fault is StopIteration else fault)
    assert others == ["a", "a"]
    assert store.num_reads - num_before == 2
    assert await names_in_memory(store) == ["a", "d"]


async def until_waiting(adapters: Adapters, num: int) -> None:
    """Wait until so many wait for an adapter to be read."""
    async with asyncio.timeout(10):
        while adapters._num_waiting < num:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0)


async def test_a_removed_adapter_stays_for_those_who_use_it(adapters: Adapters, store: FakeStore) -> None:
    async with adapters.using(terms("d")) as settled, AsyncExitStack() as later:
        adapters.remove("d")
        with pytest.raises(ModelNotFoundError, match="no adapter 'd'"):
            adapters.using(terms("d"))
        later.enter_context(adapters.keeping(settled.adapter))
        assert "d" in await names_in_memory(store)
    assert "d" not in await names_in_memory(store)
    with pytest.raises(ModelNotFoundError):
        adapters.remove("d")
    await adapters.add("d", "a")  # the name is free
    assert adapters.folders()["d"].endswith("/a")


async def test_one_that_cannot_be_read_is_not_known_and_takes_no_place(adapters: Adapters, store: FakeStore) -> None:
    store.bad = {"e"}
    for _ in range(3):
        with pytest.raises(AdapterError, match="is bad"):
            await adapters.add("e", "e")
    assert "e" not in adapters
    async with adapters.using(terms("a")), adapters.using(terms("b")):
        assert await names_in_memory(store) == ["a", "b"]


async def test_one_whose_caller_left_while_it_was_read_is_forgotten(adapters: Adapters, store: FakeStore) -> None:
    store.may_read.clear()
    adding = asyncio.create_task(adapters.add("e", "a"))
    await asyncio.sleep(0.02)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    store.may_read.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if store.num_reads == 5 and len(store.held) == 1:
            break
    assert "e" not in adapters
    assert await names_in_memory(store) == ["d"]


@pytest.mark.parametrize("name", ["", "a b", "a=b", "\u00e9", "x" * 257, "a\n"], ids=ascii)
async def test_names_are_printable_and_short(adapters: Adapters, name: str) -> None:
    with pytest.raises(AdapterError, match="lora_name must be 1 to 256 printable ASCII"):
        await adapters.add(name, "a")


async def test_a_name_stands_for_one_thing(adapters: Adapters, store: FakeStore) -> None:
    """Also while it is being read."""
    with pytest.raises(AdapterError, match="'base' is the name of the model"):
        await adapters.add("base", "a")
    store.may_read.clear()
    adding = asyncio.create_task(adapters.add("e", "a"))
    await asyncio.sleep(0)
    with pytest.raises(AdapterError, match="'e' is the name of an adapter"):
        await adapters.add("e", "b")
    store.may_read.set()
    await adding


async def test_folders_lie_under_the_root_links_followed(adapters: Adapters, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    outside.mkdir()
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "inner link").symlink_to(tmp_path / "a")
    for folder in ("..", "a/../..", "/", str(outside), "link", "link/x", f"{tmp_path}x"):
        with pytest.raises(AdapterError, match="must lie under the folder that lora_root names"):
            await adapters.add("e", folder)
    for folder in ("a\0b", "x" * 5000, "a\ud800"):
        with pytest.raises(AdapterError, match="a path of at most"):
            await adapters.add("e", folder)
    await adapters.add("e", str(tmp_path / "a"))
    await adapters.add("f", "inner link")
    assert adapters.folders()["f"] == str(tmp_path / "a")


async def test_without_a_root_none_is_added_later(store: FakeStore) -> None:
    adapters = Adapters(store, max_loaded=1)
    with pytest.raises(AdapterError, match="set lora_root"):
        await adapters.add("a", "/")
    with pytest.raises(AdapterError, match="takes no adapters"):
        await Adapters(None, root="/").add("a", "/")
    with pytest.raises(ModelNotFoundError):
        Adapters(None).using(terms("a"))


async def test_closing_ends_those_who_wait(adapters: Adapters, store: FakeStore) -> None:
    store.may_read.clear()

    async def use() -> None:
        async with adapters.using(terms("a")):
            pass

    waiting = asyncio.create_task(use())
    await asyncio.sleep(0.02)
    adapters.close()
    with pytest.raises(UnavailableError):
        await waiting
    store.may_read.set()


async def test_only_so_many_wait_at_a_time(
    adapters: Adapters, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has waited counts no more."""
    monkeypatch.setattr("aserve.adapters.MAX_WAITING", 1)
    for name in "abab":
        async with adapters.using(terms(name)):
            pass
    store.may_read.clear()
    async with AsyncExitStack() as stack:
        first = asyncio.create_task(stack.enter_async_context(adapters.using(terms("c"))))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests wait"):
            await stack.enter_async_context(adapters.using(terms("d")))
        store.may_read.set()
        await first
