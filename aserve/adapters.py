"""Adapters: which there are, by name, and that those in use are in memory.

    add(name, folder) --> known, loaded                              the least recently used that nobody uses
    using(terms)      --> loaded, unless it is; held while used       makes place when max_cpu_loras are loaded
    remove(name)      --> unknown; forgotten when its last user ends

An adapter is read in a thread of its own, before its request is opened, so that nobody else waits for it. Each time it
is read it gets another id: what was computed with another reading of it is found by nobody. Knows names and folders;
does not know what is in a folder, nor where weights go (`AdapterStore`).
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from aserve.core.errors import AdapterError, AserveError, ModelNotFoundError, OverloadedError, UnavailableError
from aserve.core.faults import for_a_future
from aserve.core.ids import AdapterId
from aserve.core.lora import ADAPTER_NAME, MAX_NAMES, NAME_RULE
from aserve.core.ports import AdapterStore
from aserve.core.request import Terms
from aserve.core.rules import check, matching, shown
from aserve.edges import is_fault

PLACE_S: Final = 60.0
"""How long a request waits for place in memory, which others in use have."""
MAX_WAITING: Final = 1024
"""Requests that wait for an adapter to be loaded."""
MAX_PATH: Final = 4096
_NAME: Final = matching(ADAPTER_NAME, NAME_RULE)


class _Adapter:
    """One that was added. id: of the reading that is in memory; None while there is none."""

    __slots__ = ("folder", "id", "is_known", "loading", "num_users")

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.id: AdapterId | None = None
        self.num_users = 0
        self.is_known = True
        self.loading: asyncio.Task[None] | None = None


class Adapters:
    """Those of one engine. Every method but `add_now` is for its event loop's thread.

    store: None where the engine takes no adapters. max_loaded: in memory at once, those in use included. root: the
    folder under which `add` may find adapters; None for nowhere. taken: names that no adapter may have.
    """

    def __init__(
        self, store: AdapterStore | None, *, max_loaded: int = 1, root: str | None = None, taken: tuple[str, ...] = ()
    ) -> None:
        self._store = store
        self._max_loaded = max_loaded
        self._root = None if root is None else Path(os.path.realpath(root))
        self._taken = taken
        self._known: dict[str, _Adapter] = {}
        self._in_memory: dict[AdapterId, _Adapter] = {}
        """Least recently used first."""
        self._num_places = 0
        """Of those in memory, and of those being read."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._num_waiting = 0
        self._loading: set[asyncio.Task[None]] = set()
        self._next_id = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="aserve-adapters")
        self._is_closed = False

    def folders(self) -> dict[str, str]:
        """Of each adapter that is known, by name."""
        return {name: adapter.folder for name, adapter in self._known.items()}

    def names(self) -> dict[AdapterId, str]:
        """Of those in memory that are known, by the id of the reading."""
        return {adapter.id: name for name, adapter in self._known.items() if adapter.id is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    # Coming.

    def add_now(self, name: str, folder: str) -> None:
        """Read an adapter from any folder, blocking: before there is an event loop. Raises as `add`."""
        self._check_new(name)
        adapter = _Adapter(folder)
        adapter_id = self._read(folder)
        if self._num_places == self._max_loaded:
            self._evict()
        self._num_places += 1
        self._take_in(adapter, adapter_id)
        self._known[name] = adapter

    async def add(self, name: str, folder: str) -> None:
        """Read an adapter under the root; from then on it is known by that name.

        Raises `AdapterError` for a name that is taken or a folder that is refused, and as `using`.
        """
        self._check_new(name)
        self._known[name] = adapter = _Adapter(self._under_root(folder))  # nobody else may have the name meanwhile
        try:
            await self._held(adapter)
        except BaseException:
            if self._known.get(name) is adapter:
                del self._known[name]
            adapter.is_known = False
            raise
        self._release(adapter)

    def remove(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on. Raises `ModelNotFoundError` for a name that is not known."""
        adapter = self._named(name)
        del self._known[name]
        adapter.is_known = False
        self._forget_if_gone(adapter)

    def _check_new(self, name: str) -> None:
        if self._store is None:
            raise AdapterError("the engine takes no adapters: start it with enable_lora", None)
        check("lora_name", _NAME, name, AdapterError)
        if name in self._known or name in self._taken:
            what = "an adapter" if name in self._known else "the model"
            raise AdapterError(f"lora_name: {shown(name)} is the name of {what} already", "lora_name")
        if len(self._known) >= MAX_NAMES:
            raise AdapterError(f"{MAX_NAMES} adapters are known, which is the most there may be", None)

    def _under_root(self, folder: str) -> str:
        """The folder without links, if it lies under the root."""
        if self._root is None:
            raise AdapterError("adapters are loaded at the start only: set lora_root to load them later")
        if not folder.isprintable() or len(folder) > MAX_PATH:
            raise AdapterError(f"lora_path must be a path of at most {MAX_PATH} printable characters")
        real = Path(os.path.realpath(self._root / folder))
        if not real.is_relative_to(self._root):
            raise AdapterError(f"lora_path must lie under the folder that lora_root names, got {shown(folder)}")
        return str(real)

    # In use.

    @property
    def names_in_memory(self) -> tuple[str, ...]:
        """Of those whom a request need not wait for."""
        return tuple(name for name, adapter in self._known.items() if adapter.id is not None)

    def using(self, terms: Terms) -> AbstractAsyncContextManager[Terms]:
        """The terms with the id of the adapter that they name, which stays in memory until the context is left.

        Raises `ModelNotFoundError` for one that is not known, `OverloadedError` where there is no place for it, and
        `AdapterError` where it cannot be read any more.
        """
        return nullcontext(terms) if terms.lora is None else self._using(terms, self._named(terms.lora))

    @asynccontextmanager
    async def _using(self, terms: Terms, adapter: _Adapter) -> AsyncIterator[Terms]:
        adapter_id = await self._held(adapter)
        try:
            yield msgspec.structs.replace(terms, adapter=adapter_id)
        finally:
            self._release(adapter)

    @contextmanager
    def keeping(self, adapter_id: AdapterId | None) -> Iterator[None]:
        """Hold one that is in use, for somebody else too; None is nothing."""
        adapter = None if adapter_id is None else self._in_memory[adapter_id]
        if adapter is not None:
            adapter.num_users += 1
        try:
            yield
        finally:
            if adapter is not None:
                self._release(adapter)

    def _named(self, name: str) -> _Adapter:
        if name not in self._known:
            raise ModelNotFoundError(f"there is no adapter {shown(name)} here")
        return self._known[name]

    async def _held(self, adapter: _Adapter) -> AdapterId:
        """One more uses it: from now on it stays in memory, where it is when this returns."""
        adapter.num_users += 1
        try:
            while adapter.id is None:
                await self._loaded(adapter)
        except BaseException:
            self._release(adapter)
            raise
        self._in_memory[adapter.id] = self._in_memory.pop(adapter.id)
        return adapter.id

    async def _loaded(self, adapter: _Adapter) -> None:
        """Wait for it to be read, by whoever came first; a fault of theirs is nobody else's, who may read it again."""
        if self._is_closed:
            raise UnavailableError("the engine is closed")
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} requests wait for adapters to be loaded")
        is_first = adapter.loading is None
        if adapter.loading is None:
            adapter.loading = asyncio.create_task(self._load(adapter), name="aserve: loading an adapter")
            self._loading.add(adapter.loading)
            adapter.loading.add_done_callback(self._loading.discard)
            adapter.loading.add_done_callback(_heard)
        self._num_waiting += 1
        try:
            await asyncio.shield(adapter.loading)  # others may wait for it too
        except BaseException as error:
            if self._is_closed and isinstance(error, asyncio.CancelledError):
                raise UnavailableError("the engine is closed") from None
            if is_first or isinstance(error, AserveError) or not is_fault(error):
                raise
        finally:
            self._num_waiting -= 1

    def _release(self, adapter: _Adapter) -> None:
        adapter.num_users -= 1
        self._forget_if_gone(adapter)
        if not adapter.num_users:
            self._wake_next()

    # Memory.

    async def _load(self, adapter: _Adapter) -> None:
        try:
            await self._place()
            try:
                event_loop = asyncio.get_running_loop()
                read = partial(self._read, adapter.folder)
                adapter_id = await event_loop.run_in_executor(self._reader, for_a_future, read)
            except BaseException:
                self._num_places -= 1
                self._wake_next()
                raise
            self._take_in(adapter, adapter_id)
        finally:
            adapter.loading = None
        self._forget_if_gone(adapter)

    async def _place(self) -> None:
        """Room in memory for one more, that of the least recently used which nobody uses if need be."""
        try:
            async with asyncio.timeout(PLACE_S):
                while self._num_places >= self._max_loaded and not self._evict():
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    try:
                        await waiter
                    finally:
                        with suppress(ValueError):
                            self._waiters.remove(waiter)
        except TimeoutError:
            self._wake_next()
            raise OverloadedError(
                f"{self._num_places} adapters are in use, which is as many as fit into memory (max_cpu_loras)"
            ) from None
        self._num_places += 1

    def _evict(self) -> bool:
        """Forget the least recently used reading that nobody uses; whether there is one."""
        for adapter_id, adapter in self._in_memory.items():
            if not adapter.num_users:
                self._drop(adapter_id)
                return True
        return False

    def _read(self, folder: str) -> AdapterId:
        """In the reader's thread, or before there is one."""
        assert self._store is not None, "nobody adds adapters"
        adapter_id = AdapterId(self._next_id)
        self._next_id += 1
        self._store.load(adapter_id, folder)
        return adapter_id

    def _take_in(self, adapter: _Adapter, adapter_id: AdapterId) -> None:
        adapter.id = adapter_id
        self._in_memory[adapter_id] = adapter

    def _forget_if_gone(self, adapter: _Adapter) -> None:
        if not adapter.is_known and not adapter.num_users and adapter.id is not None:
            self._drop(adapter.id)
            self._wake_next()

    def _drop(self, adapter_id: AdapterId) -> None:
        assert self._store is not None, "nobody adds adapters"
        self._in_memory.pop(adapter_id).id = None
        self._num_places -= 1
        self._store.drop(adapter_id)

    def _wake_next(self) -> None:
        """Whoever waits longest for a place may find one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def close(self) -> None:
        """End what is being read, and the thread. Idempotent."""
        self._is_closed = True
        for loading in tuple(self._loading):
            loading.cancel()
        self._reader.shutdown(wait=False, cancel_futures=True)


def _heard(loading: asyncio.Task[None]) -> None:
    """Nobody may be left who waits for it."""
    if not loading.cancelled():
        loading.exception()
