"""The fault points: every call between floors, by name, and where a trap is put in its way.

What is passed into the engine (tokenizer, template, scheduler, runner, clock, the server's transport) is the case's
own, and the trap is an attribute of it. What the product makes for itself is trapped at its class or where it is
imported, for the length of a case.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import torch

from aserve import engine, preparation
from aserve.engine import Engine
from aserve.http import access, endpoint, generation, middleware, request_id, sse
from aserve.http.json_response import JsonResponse
from aserve.http.openai import chat, completions, tokenize
from aserve.http.openai.logprobs import CompletionLogprobs
from aserve.http.tally import Tally
from aserve.kv_cache.block_pool import BlockPool
from aserve.kv_cache.paged_cache import PagedCache
from aserve.mailbox import Keeper, Mailbox
from aserve.metrics.engine_metrics import EngineMetrics, RequestTimes
from aserve.scheduler import landing
from aserve.scheduler.beam import BeamSearch
from aserve.scheduler.deadlines import Deadlines
from aserve.scheduler.held_back import Ranking
from aserve.scheduler.residents import Residents
from aserve.tenants import Tenants
from aserve.text.detokenizer import Detokenizer
from aserve.text.stop_strings import StopMatcher
from aserve.text.stream import TextStream
from aserve.texts import Texts
from aserve.workers import Workers
from tests.fakes import ScriptedFlight
from tests.faults.world import WHOSE, World

CANARY = "a canary that nobody may hear"
DELAY_S = 3.0
TURNS = 20


class Panic(BaseException):
    """What a library raises that is no Exception, as pyo3's PanicException."""


class Delay(BaseException):
    """Not to be raised: the call takes its time."""


FAULTS: tuple[type[BaseException], ...] = (
    RuntimeError,
    MemoryError,
    torch.OutOfMemoryError,
    StopIteration,
    Panic,
    asyncio.CancelledError,
    Delay,
)


class Trap:
    """Makes the k-th call of a point fail, or take long. owner: for whom that call was; "" for nobody in particular."""

    def __init__(self, world: World, k: int, fault: type[BaseException]) -> None:
        self._world = world
        self._k = k
        self._fault = fault
        self.num_calls = 0
        self.owner = ""

    @property
    def has_fired(self) -> bool:
        """Whether there was a k-th call."""
        return self.num_calls >= self._k

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with the trap before it."""

        def trapped(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls != self._k:
                return call(*arguments, **options)
            self.owner = WHOSE.get()
            if self._fault is not Delay:
                raise self._fault(CANARY)
            self._world.clock.advance(DELAY_S)
            result = call(*arguments, **options)
            return _later(result) if inspect.iscoroutine(result) else result

        return trapped

    def pieces(self, call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same iterator, each of whose steps is a call."""
        return lambda *arguments: _Pieces(self.around(call(*arguments).__next__))


class _Pieces:
    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._step()


async def _later(result: Any) -> Any:
    try:
        for _ in range(TURNS):
            await asyncio.sleep(0)
    except BaseException:
        result.close()
        raise
    return await result


@dataclass(frozen=True)
class Point:
    """A call between floors.

    seams: of a world, the objects that have the call as an attribute, and its name.
    of_nobody: no answer may differ, for the call is not made on anybody's behalf.
    of_caller: likewise where the engine makes it; where a client's task does, the answer of that client may.
    cuts: the answer of whom it hits may end in the middle, for it is the way to the client that fails.
    failing_steps: steps that fail, where the call is made only then.
    may_end_engine: why the engine may end at it.
    wraps_pieces: the call makes an iterator, and it is that which fails.
    is_early: the trap is put in before the engine is entered, which takes what has it.
    world: in which the call is made.
    """

    name: str
    seams: Callable[[World], list[tuple[Any, str]]]
    of_nobody: bool = False
    of_caller: bool = False
    cuts: bool = False
    failing_steps: tuple[int, ...] = ()
    may_end_engine: str = ""
    wraps_pieces: bool = False
    is_early: bool = False
    world: type[World] = World

    def arm(self, world: World, trap: Trap, patches: pytest.MonkeyPatch) -> None:
        """Put the trap in."""
        for owner, attribute in self.seams(world):
            wrap = trap.pieces if self.wraps_pieces else trap.around
            patches.setattr(owner, attribute, wrap(getattr(owner, attribute)))


def at(*seams: tuple[Any, str]) -> Callable[[World], list[tuple[Any, str]]]:
    """Seams that are the same in every world."""
    return lambda _world: list(seams)


def of(part: str, attribute: str) -> Callable[[World], list[tuple[Any, str]]]:
    """A part of the world."""
    return lambda world: [(getattr(world, part), attribute)]


class _AlwaysDue(Deadlines):
    """Is looked at before every plan, as if somebody's time were up."""

    next_s = property(lambda _: -inf, lambda _, __: None)  # type: ignore[assignment]


def _expire(world: World) -> list[tuple[Any, str]]:
    world.scheduler._deadlines = _AlwaysDue()
    return [(world.scheduler, "expire")]


class _Table:
    """A table of the tokenizer's whose look-ups can be trapped."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.leading = getattr(table, "leading", "")
        self.look_up = table.__getitem__

    def __getitem__(self, token_id: int) -> Any:
        return self.look_up(token_id)


def _table(name: str) -> Callable[[World], list[tuple[Any, str]]]:
    def seams(world: World) -> list[tuple[Any, str]]:
        table = _Table(getattr(world.tokenizer, name))
        setattr(world.tokenizer, name, table)
        return [(table, "look_up")]

    return seams


WIRES = (chat.ChatWire, completions.TextWire)
FAILING = (2, 12, 22, 32)
"""So far apart that the search for a culprit has ended before the next."""
LOST = "a device that does not answer after a failed step is lost"

POINTS = (
    # The server, and what stands before the routes.
    Point("server receive", of("transport", "receive"), cuts=True),
    Point("server send", of("transport", "send"), cuts=True),
    Point("direct line write", of("transport", "write"), cuts=True),
    Point("direct line is_clear", of("transport", "is_clear")),
    Point("request id", at((request_id, "id_of"))),
    Point("guard head", at((middleware, "check_head"))),
    Point("executor submit", lambda world: [(world.engine.workers._executor, "submit")]),
    Point("whose it is", at((endpoint, "tenant_of"))),
    Point("access record", at((endpoint, "record_of"), (sse, "record_of"), (access, "record_of"))),
    Point("access line", at((access, "log_access"))),
    # A request's body, fields and prompt.
    Point("body read", at((endpoint, "read_object"))),
    Point("body name", at((endpoint, "name_request"))),
    Point("schema parse", at(*((module, "parse") for module in (chat, completions, tokenize)))),
    Point("schema model", at(*((module, "check_model") for module in (chat, completions, tokenize)))),
    Point("schema params", at(*((module, "sampling_params") for module in (chat, completions)))),
    Point("schema prompts", at((completions, "prompts_of"))),
    Point("tenants entered", at((Tenants, "entered"))),
    Point("tenants allowances", at((Tenants, "allowances"))),
    Point("tenants account", at((Tenants, "account"))),
    Point("workers run", at((Workers, "run"))),
    Point("texts length", at((Texts, "check_length"))),
    Point("engine encode", at((Engine, "encode"))),
    Point("engine decode", at((Engine, "decode"))),
    Point("engine open", at((Engine, "open"))),
    Point("tokenizer encode", of("tokenizer", "encode")),
    Point("tokenizer decode", of("tokenizer", "decode")),
    Point("tokenizer token_texts", _table("token_texts"), is_early=True),
    Point("tokenizer text_bytes", _table("text_bytes"), is_early=True),
    Point("template render", of("template", "render")),
    Point("intake request", at((engine, "new_request"))),
    Point("intake branch", at((engine, "new_branch"))),
    Point("preparation ids", at((preparation, "check_ids"))),
    Point("preparation hashes", of("scheduler", "prompt_hashes"), wraps_pieces=True),
    # The scheduler.
    Point("scheduler check_room", of("scheduler", "check_room")),
    Point("scheduler expire", _expire, of_nobody=True),
    Point("scheduler add", of("scheduler", "add")),
    Point("scheduler fork", of("scheduler", "fork")),
    Point("scheduler history", of("scheduler", "history")),
    Point("scheduler cancel", of("scheduler", "cancel")),
    Point("scheduler abort", of("scheduler", "abort")),
    Point("scheduler finish", of("scheduler", "finish")),
    Point("scheduler plan", of("scheduler", "plan"), of_nobody=True),
    Point("scheduler commit", of("scheduler", "commit"), of_nobody=True),
    Point("scheduler revert", of("scheduler", "revert"), of_nobody=True, failing_steps=FAILING),
    Point("stopping", at((landing, "reason_to_stop"))),
    Point("ranking", at((Ranking, "add"))),
    Point("beams", at((BeamSearch, "advance"))),
    Point("residents admit", at((Residents, "admit")), of_nobody=True),
    Point("residents remove", at((Residents, "remove"))),
    Point("residents rewind", at((Residents, "rewind")), of_nobody=True, failing_steps=FAILING),
    Point("residents block ops", at((Residents, "take_block_ops")), of_nobody=True),
    Point("cache new_table", at((PagedCache, "new_table"))),
    Point("cache acquire", at((PagedCache, "acquire")), of_nobody=True),
    Point("cache fork", at((PagedCache, "fork")), of_nobody=True),
    Point("cache reserve", at((PagedCache, "reserve")), of_nobody=True),
    Point("cache seal", at((PagedCache, "seal")), of_nobody=True),
    Point("cache free", at((PagedCache, "free"))),
    Point("pool allocate", at((BlockPool, "allocate")), of_nobody=True),
    Point("pool release", at((BlockPool, "release"))),
    # The runner.
    Point("runner launch", of("runner", "launch"), of_nobody=True),
    Point("flight land", at((ScriptedFlight, "land")), of_nobody=True),
    Point("runner recover", of("runner", "recover"), of_nobody=True, failing_steps=FAILING, may_end_engine=LOST),
    Point("clock", of("clock", "read"), of_caller=True),
    # Publishing.
    Point("metrics arrived", at((EngineMetrics, "arrived"))),
    Point("metrics one_token_each", at((EngineMetrics, "one_token_each")), of_nobody=True),
    Point("metrics step_failed", at((EngineMetrics, "step_failed")), of_nobody=True, failing_steps=FAILING),
    Point("times tokens", at((RequestTimes, "tokens"))),
    Point("times finished", at((RequestTimes, "finished"))),
    Point("times left", at((RequestTimes, "left"))),
    Point("times choice_ended", at((RequestTimes, "choice_ended"))),
    Point("times told", at((RequestTimes, "told"))),
    Point("times timings", at((RequestTimes, "timings"))),
    Point("text begun", at((TextStream, "__init__"))),
    Point("text push", at((TextStream, "push"))),
    Point("stop matcher begun", at((StopMatcher, "__init__"))),
    Point("stop matcher feed", at((StopMatcher, "feed"))),
    Point("detokenizer feed", at((Detokenizer, "feed"))),
    Point("detokenizer flush", at((Detokenizer, "flush"))),
    Point("mailbox made", at((Mailbox, "__init__"))),
    Point("mailbox put", at((Mailbox, "put"))),
    Point("mailbox offer", at((Mailbox, "offer"))),
    Point("mailbox take", at((Mailbox, "__anext__"))),
    Point("keeper take", at((Keeper, "take"))),
    Point("keeper take_token", at((Keeper, "take_token"))),
    Point("writer take", at((generation._Writer, "take"))),
    Point("writer take_token", at((generation._Writer, "take_token"))),
    # The answer.
    Point("events of", at((generation.Events, "of"))),
    Point("tally count", at((Tally, "count"))),
    Point("tally usage", at((generation, "usage_of"))),
    Point("wire made", at(*((wire, "__init__") for wire in WIRES))),
    Point("wire opening", at(*((wire, "opening") for wire in WIRES))),
    Point("wire delta", at(*((wire, "delta") for wire in WIRES))),
    Point("wire frame", at(*((wire, "frame") for wire in WIRES))),
    Point("wire whole", at(*((wire, "whole") for wire in WIRES))),
    Point("wire end", at(*((wire, "end") for wire in WIRES))),
    Point("wire logprobs", at((CompletionLogprobs, "part"))),
    Point("json of a token", at((generation, "_encode"))),
    Point("json of an answer", at((JsonResponse, "render"))),
    Point("stream made", at((generation, "EventStream"))),
    Point("stream write", at((sse.EventStream, "_write"))),
    Point("stream write_now", at((sse.EventStream, "write_now"))),
)
