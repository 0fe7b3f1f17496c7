"""Engine: a model being served inside somebody's asyncio application.

Owns the lifetime (load, run, drain, close) and turns what a caller has (text, token ids, messages, SamplingParams) into
what the loop takes (a Request). Starts no process, installs no signal handler, reads no environment, keeps no global;
two engines can live in one event loop. How a model is loaded is the business of the `Loader` that it is given.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from prometheus_client import CollectorRegistry

from aserve.adapters import Adapters
from aserve.answers import Answers, Prompt
from aserve.core.config import EngineConfig, ModelInfo
from aserve.core.ended import EndListener
from aserve.core.errors import AserveError, StepTimeoutError, UnavailableError
from aserve.core.explanation import Explanation
from aserve.core.ids import BlockHash
from aserve.core.params import SamplingParams
from aserve.core.pooling import PoolingParams, TokenizedInput
from aserve.core.ports import Clock, Structure
from aserve.core.request import RequestTerms, Terms
from aserve.core.rules import check, text
from aserve.encoding import Encoding
from aserve.engine_loop import EngineLoop
from aserve.engine_parts import CANCELLED, ELSEWHERE, EngineParts, EngineState, Loader, Progress, load_in_thread
from aserve.intake import (
    PARAMS,
    branch_terms,
    branches_of,
    check_generates,
    known_id,
    new_branch,
    new_input,
    new_request,
    new_terms,
    prompt_ids,
)
from aserve.mailbox import Mailbox
from aserve.metrics.engine_metrics import EngineMetrics
from aserve.observe.observer import Observer
from aserve.preparation import Preparer
from aserve.scheduler.statistics import Statistics
from aserve.structures import Structures
from aserve.tenants import Tenants
from aserve.text.stream import TextStream, VectorStream
from aserve.texts import Texts
from aserve.vectors import DEFAULT, Vectors
from aserve.workers import Workers


class Engine(Encoding, Answers, Vectors):
    """`async with` loads the model and serves until the block is left, which ends open requests and frees the memory.

    load: makes the parts; see build.py for aserve's own.
    on_progress: called on the event loop's thread with each stage of loading.
    """

    def __init__(
        self, load: Loader, *, on_progress: Callable[[Progress], None] | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._load = load
        self._on_progress = on_progress
        self._clock = clock
        self._preparer = Preparer()
        self.workers = Workers()
        """Threads for what a request's texts need, its body included."""
        self._state = EngineState.NEW
        self._progress = Progress("new")
        self._parts: EngineParts | None = None
        self._structures: Structures | None = None
        self._loop: EngineLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self.registry = CollectorRegistry()
        """Prometheus metrics of this engine alone."""
        self.tenants = Tenants(clock)
        """Who may use how much of it, and has."""
        self.end_listeners: list[EndListener] = []
        """Called with each request when it is over; see `EndListener`."""
        self.died = asyncio.Event()
        """Set when the engine ends by itself, a bug of ours, or its task is cancelled; `failure` says what happened."""
        self.failure: BaseException | None = None

    # Lifetime

    @property
    def state(self) -> EngineState:
        """Where in its life the engine is."""
        return self._state

    @property
    def progress(self) -> Progress:
        """The stage of loading that was reported last."""
        return self._progress

    @property
    def info(self) -> ModelInfo:
        """The model that is served. Raises `UnavailableError` before it is loaded."""
        return self._ready().info

    @property
    def config(self) -> EngineConfig:
        """The numbers that were decided at loading. Raises `UnavailableError` before."""
        return self._ready().config

    @property
    def observer(self) -> Observer:
        """Tells what happens in each step. Raises `UnavailableError` where no requests are taken."""
        return self._running().observer

    @property
    def adapters(self) -> Adapters:
        """Those that requests may name. Raises `UnavailableError` before the model is loaded."""
        return self._ready().adapters

    async def __aenter__(self) -> Self:
        if self._state is not EngineState.NEW:
            raise UnavailableError(f"an engine is entered once, and this one is {self._state.value}")
        self._state = EngineState.LOADING
        try:
            parts = await load_in_thread(self._load, lambda: self._state is EngineState.LOADING, self._report)
        except BaseException:
            self._state = EngineState.CLOSED
            raise
        self._parts = parts
        self._structures = Structures(parts.tokenizer, parts.info, self.workers)
        told = self.registry, parts.info.names[0], parts.scheduler.statistics, self.tenants.usages
        names = parts.adapters.names
        metrics = EngineMetrics(*told, config=parts.config, adapter_names=names, end_listeners=self.end_listeners)
        made_of = parts.scheduler, parts.runner, metrics, self._clock, parts.tokenizer.token_texts
        self._loop = EngineLoop(*made_of, step_timeout_s=parts.config.step_timeout, tenants=self.tenants)
        self._task = asyncio.create_task(self._loop.run(), name="aserve engine loop")
        self._task.add_done_callback(partial(self._loop_ended, self._loop))
        self._watch = asyncio.create_task(self._loop.watch(), name="aserve event loop lag")
        self._state = EngineState.READY
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End open requests with `UnavailableError`, stop the loop, give back threads and memory. Idempotent.

        A call that is cancelled leaves that going on, and the next one waits for its end. Raises what ended the loop,
        if a bug of ours did, to the first that comes to its end.
        """
        if self._state is not EngineState.DEAD:
            self._state = EngineState.CLOSED
        if self._closing is None or self._closing.cancelled():
            self._closing = asyncio.create_task(self._close(), name="aserve engine: closing")
        if not self._closing.done():
            await asyncio.wait([self._closing])
        task, self._task = self._task, None
        if task is not None and task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
        if not self._closing.cancelled():
            self._closing.result()

    async def _close(self) -> None:
        tasks = [task for task in (self._task, self._watch) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._loop, self._watch = None, None
            self.workers.close()
            parts, self._parts = self._parts, None
            if parts is not None:
                await parts.close(is_stuck=isinstance(self.failure, StepTimeoutError))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; whether all of them ended within `timeout_s`."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                while self._loop is not None and self._loop.num_readers > 0:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def statistics(self) -> Statistics:
        """Counts of the scheduler at this moment. Raises `UnavailableError` before the model is loaded."""
        return self._ready().scheduler.statistics()

    def is_cached(self, block_hash: BlockHash) -> bool:
        """Whether a later request would find a prompt's block, by its hash. Raises as `statistics`."""
        return self._ready().scheduler.is_cached(block_hash)

    def reset_prefix_cache(self) -> int:
        """No later request finds what was computed so far. How many blocks were forgotten; raises as `statistics`."""
        return self._ready().scheduler.reset_prefix_cache()

    def _report(self, progress: Progress) -> None:
        self._progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)

    def _loop_ended(self, loop: EngineLoop, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            loop.end()  # a task that is cancelled before its first step has run nothing, `finally` included
            if self._state is EngineState.CLOSED:
                return
        self._state = EngineState.DEAD
        self.failure = UnavailableError(CANCELLED) if task.cancelled() else task.exception()
        self.died.set()

    def _ready(self) -> EngineParts:
        if self._parts is None or self._closing is not None:
            raise self._unavailable()
        return self._parts

    def _running(self) -> EngineLoop:
        if self._loop is None or self._state is not EngineState.READY:
            raise self._unavailable()
        return self._loop

    def _serving(self) -> tuple[EngineParts, EngineLoop]:
        """What takes requests, while it does, for whoever is in its event loop."""
        loop = self._running()
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            raise UnavailableError(ELSEWHERE)
        return self._ready(), loop

    def _unavailable(self) -> UnavailableError:
        hint = ": enter it first, with `async with`" if self._state is EngineState.NEW else ""
        return UnavailableError(f"the engine is {self._state.value}{hint}")

    def __repr__(self) -> str:
        model = "" if self._parts is None else f" {self._parts.info.names[0]!r}"
        return f"<{type(self).__name__}{model} {self._state.value}>"

    @property
    def texts(self) -> Texts:
        """What is done with texts, and its bounds. Raises `UnavailableError` before the model is loaded."""
        parts = self._ready()
        return Texts(parts.tokenizer, parts.chat_template, parts.info, self.workers)

    # Requests

    def default_params(self, **fields: Any) -> SamplingParams:
        """SamplingParams from the model's generation_config.json, with `fields` in their place where not None.

        Raises `InvalidRequestError` for a model that pools.
        """
        check_generates(self.info)
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**self._ready().info.default_sampling, **given})

    def check_room(self, num_before: int = 0, **terms: Unpack[RequestTerms]) -> None:
        """Raise `OverloadedError` if `open` would, after so many others. Cheap: asked before a prompt is rendered."""
        self._ready().scheduler.check_room(self._terms(**terms), num_before)

    def _terms(self, *, tenant: str = "", **terms: Any) -> Terms:
        """Of a request that comes now, on that tenant's account."""
        account = self.tenants.account(check("tenant", text, tenant))
        return new_terms(self._clock(), account.tenant, self._ready().config.request_timeout, **terms)

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        starts_text: bool = False,
        markers: frozenset[str] = frozenset(),
        **terms: Unpack[RequestTerms],
    ) -> AsyncIterator[Mailbox]:
        """Submit a prompt (text or token ids); inside the block, iterate the mailbox. Leaving the block cancels.

        params: None is what the model's generation_config.json says. terms: see `RequestTerms`. starts_text: the answer
        is a text of its own (a chat message) and does not continue the prompt's: SentencePiece tokenizers then drop the
        space before its first word. markers: special tokens in them are shown all the same.

        Raises `InvalidRequestError` (a token id or parameter out of bounds, an empty prompt, an id that is in use),
        `ContextLengthError` (it can never fit), `OverloadedError` (see `check_room`), `UnavailableError` (loading,
        draining, closed, entered in another event loop), `ModelNotFoundError` (no such adapter); in the block
        `QueueTimeoutError` when its time is up before anything was computed.
        """
        parts, loop = self._serving()
        check_generates(parts.info)
        settled = self._terms(**terms)
        parts.scheduler.check_room(settled)
        params = self.default_params() if params is None else check("params", PARAMS, params)
        token_ids = await self.encode(prompt, must_fit=True) if isinstance(prompt, str) else prompt_ids(prompt)
        structure = self._bounded(await self._compiled(params), params, token_ids)
        try:
            async with parts.adapters.using(settled) as settled:
                request = new_request(parts.info, parts.tokenizer, token_ids, params, settled, structure)
                request = await self._preparer.prepared(request, parts.info, parts.scheduler)
                spaced = not starts_text or params.structured is not None  # a structure is of the whole text
                new = partial(TextStream, parts.tokenizer, request.params, keep_leading_space=spaced, markers=markers)
                async with loop.open(request, new) as mailbox:
                    yield mailbox
        finally:
            self._idle.set()

    @asynccontextmanager
    async def open_input(
        self, tokens: TokenizedInput, params: PoolingParams = DEFAULT, **terms: Unpack[RequestTerms]
    ) -> AsyncIterator[Mailbox]:
        """Submit an input to a model that pools; inside the block, its mailbox has one delta, with a vector.

        Raises as `open`, and `InvalidRequestError` for a model that generates.
        """
        parts, loop = self._serving()
        self.check_pooling(params)
        settled = self._terms(**terms)
        parts.scheduler.check_room(settled)
        try:
            async with parts.adapters.using(settled) as settled:
                request = new_input(parts.info, tokens, settled, per_token=params.per_token)
                request = await self._preparer.prepared(request, parts.info, parts.scheduler)
                async with loop.open(request, VectorStream) as mailbox:
                    yield mailbox
        finally:
            self._idle.set()

    @asynccontextmanager
    async def fork(
        self,
        handle: Mailbox,
        branches: int | Sequence[SamplingParams],
        *,
        index: int = 0,
        request_ids: Sequence[str] | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
        explain: bool = False,
    ) -> AsyncIterator[list[Mailbox]]:
        """Branch a generation that is open, running or finished: a mailbox for each branch, as in `open`.

        A branch continues from the tokens that choice `index` has at this moment, on the blocks computed for them, with
        parameters of its own. branches: those, or how many with default parameters. A structure that is the
        generation's too goes on, another begins with the branch. request_ids: one each. priority, timeout_s: the
        generation's own priority and deadline unless given; its cache_salt in any case. explain: see `RequestTerms`.

        Raises `InvalidRequestError` for a generation that is not open, for choices that are ranked (best_of, beam
        search) and where there are not as many request_ids as branches; else as `open`.
        """
        parts, loop = self._serving()
        origin = loop.request(handle.request_id)
        all_params, index = branches_of(branches, index, self.default_params)
        given = self._clock(), parts.config.request_timeout, request_ids, priority, timeout_s, explain
        all_terms = branch_terms(origin, len(all_params), *given)
        compiled = [await self._compiled(params) for params in all_params]
        history = parts.scheduler.history(origin.id, index)  # not before: it grows while others are waited for
        structures = [self._bounded(one, params, history) for one, params in zip(compiled, all_params, strict=True)]
        requests = [
            new_branch(parts.info, parts.tokenizer, origin, history, params, terms, structure)
            for params, terms, structure in zip(all_params, all_terms, structures, strict=True)
        ]
        new_streams = [partial(TextStream, parts.tokenizer, params, keep_leading_space=True) for params in all_params]
        try:
            with parts.adapters.keeping(origin.adapter):
                async with loop.fork(origin.id, index, requests, new_streams) as mailboxes:
                    yield mailboxes
        finally:
            self._idle.set()

    async def _compiled(self, params: SamplingParams) -> Structure | None:
        """The structure of an answer, if it is to have one. Raises as `Structures.compiled`."""
        if self._structures is None or params.structured is None:
            return None
        return await self._structures.compiled(params.structured)

    def _bounded(self, structure: Structure | None, params: SamplingParams, prompt: Sequence[int]) -> Structure | None:
        """The same with the budget of its thoughts, if it has one. Raises as `Structures.bounded`."""
        if self._structures is None or (budget := params.thinking_token_budget) is None:
            return structure
        return self._structures.bounded(structure, budget, in_thought=self.texts.begins_thought(prompt))

    def abort(self, request_id: str) -> bool:
        """End the request of this id with what it has so far; its reader gets that, and the finish reason "abort".

        False where no such request is open: it is unknown, has not been taken yet, or has ended. Call it in the
        engine's event loop. Raises `InvalidRequestError` for an id that is no text.
        """
        return self._loop is not None and self._loop.abort(known_id(request_id))

    def explanation(self, request_id: str) -> Explanation | None:
        """As `Answers.explanation`."""
        return None if self._loop is None else self._loop.observer.explanation(known_id(request_id))


__all__ = ["AserveError", "Engine", "EngineParts", "EngineState", "Loader", "Progress"]
