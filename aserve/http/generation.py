"""Running the prompts of one request, and answering whole or as a stream. How the answer is spelled is a `Wire`'s.

    prompts --> engine.open each --> Mailbox of all --> Wire --> bytes --> client

The prompts of a request run at once; when one fails, or the client leaves, all are ended and give back what they hold.
Of P prompts with n choices each, choice k of prompt p has the index p * n + k.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from aserve.core.errors import AserveError
from aserve.core.outputs import Completion, FinishReason, TextDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import TokenScores
from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.endpoint import Exchange
from aserve.http.explaining import NOTHING, Explained, Told
from aserve.http.json_response import JsonResponse
from aserve.http.sse import EventStream, StreamLimits
from aserve.http.tally import Tally, TokenIds, less, usage_of
from aserve.http.tasks import task_group
from aserve.mailbox import Keeper, Mailbox

Usage = dict[str, Any]
Settle = Callable[[], Awaitable[None]]
"""Awaited when the end of an answer has been made, before it is sent."""

OFF_LOOP_CHARS: Final = 64 * 1024
"""Whole answers of more are spelled in a thread."""
_encode: Final = msgspec.json.encode


class Wire(Protocol):
    """How one API spells an answer. What returns bytes returns whole events; b"" is nothing to say.

    usage: the token counts so far, where every event has them.
    """

    def opening(
        self, index: int, prompt_token_ids: TokenIds, prompt_scores: Sequence[TokenScores], usage: Usage | None
    ) -> bytes:
        """What comes before the first delta of a choice."""
        ...

    def delta(self, delta: TextDelta, usage: Usage | None) -> bytes:
        """What a choice gained."""
        ...

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What comes before and after a choice's text, as JSON, in `delta` of a text alone, that is not empty.

        None where events say more than the text.
        """
        ...

    def end(self, usage: Usage | None, told: Told = NOTHING) -> bytes:
        """What follows the last delta of all. usage: the token counts, where the request wants them at the end. told:
        what the event says, too, that has them.
        """
        ...

    def failure(self, error: AserveError) -> bytes:
        """What follows where the answer went wrong after it had begun."""
        ...

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Prompts to run with the same parameters, and how to answer.

    include_usage, continuous_usage: token counts at the end of a stream, and in every chunk.
    starts_text, markers, cache_salt, priority, tenant, lora, timeout_s: see `Engine.open`.
    scores_only: nothing is generated. (The engine generates one token, which is left out.)
    name: what the client calls it. explained: where its explanations go, if it asks for any.
    """

    prompts: Sequence[TokenIds]
    params: SamplingParams
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    starts_text: bool = False
    markers: frozenset[str] = frozenset()
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    lora: str | None = None
    timeout_s: float | None = None
    scores_only: bool = False
    name: str = ""
    explained: Explained | None = None

    def told(self) -> Told:
        """What its answer says at the end, besides what its API has."""
        return NOTHING if self.explained is None else self.explained.told()

    def tallies(self) -> list[Tally]:
        """One a choice, by index."""
        return [Tally(prompt) for prompt in self.prompts for _ in range(self.params.n)]


async def _at_once() -> None:
    """Nothing has to be done before the end is sent."""


async def answer(
    engine: Engine,
    generation: Generation,
    wire: Wire,
    exchange: Exchange,
    limits: StreamLimits,
    *,
    settle: Settle = _at_once,
) -> None:
    """Run the prompts and reply. Raises `AserveError` for what goes wrong before the reply has begun."""
    async with open_all(engine, generation) as mailbox:
        if generation.stream:
            await _stream(generation, wire, mailbox, exchange, limits, settle)
            return
        tallies = generation.tallies()
        exchange.record.usage = partial(usage_of, tallies, generation.params.n)
        keeper = Keeper(tallies)
        mailbox.shortcut(keeper)
        async for delta in _deltas(generation, mailbox):
            keeper.take(delta)
    n = generation.params.n
    completions = [tally.completion(_first(tallies, i, n).prompt_scores) for i, tally in enumerate(tallies)]
    exchange.record.was_aborted = any(each.finish_reason is FinishReason.ABORT for each in completions)
    told = {**generation.told(), **({"warnings": exchange.warnings} if exchange.warnings else {})}

    def whole() -> dict[str, Any]:
        return wire.whole(completions, usage_of(tallies, n)) | told

    is_long = sum(len(completion.text) for completion in completions) > OFF_LOOP_CHARS
    body = await exchange.workers.run(whole) if is_long else whole()
    await settle()
    await exchange.reply(JsonResponse(body))


async def _stream(
    generation: Generation, wire: Wire, mailbox: Mailbox, exchange: Exchange, limits: StreamLimits, settle: Settle
) -> None:
    """Reply with events as they come. While the client keeps up, most are written straight from the mailbox."""
    events = Events(generation, wire)
    exchange.record.usage = partial(usage_of, events.tallies, generation.params.n)

    async def pieces() -> AsyncGenerator[bytes]:
        async for delta in _deltas(generation, mailbox):
            if piece := events.of(delta):
                if events.num_open == 0:
                    await settle()
                yield piece
        exchange.record.was_aborted = events.was_aborted

    async with aclosing(pieces()) as rest:
        stream = EventStream(b"", rest, limits, wire.failure, exchange.request_id)
        stream.first = await anext(rest)  # what fails until now still has an HTTP status
        if not generation.scores_only:
            mailbox.shortcut(_Writer(events, stream))
        await exchange.reply(stream)


def _deltas(generation: Generation, mailbox: Mailbox) -> AsyncIterator[TextDelta]:
    return _without_output(mailbox) if generation.scores_only else mailbox


async def _without_output(deltas: AsyncIterator[TextDelta]) -> AsyncIterator[TextDelta]:
    """What is told of the prompt, and that it is over."""
    async for delta in deltas:
        ends = delta.finish_reason is not None
        yield msgspec.structs.replace(
            delta,
            text="",
            token_ids=(),
            scores=(),
            finish_reason=FinishReason.LENGTH if ends else None,
            stop_reason=None,
        )


class _Writer:
    """Writes events from where the deltas come, while the client keeps up."""

    def __init__(self, events: "Events", stream: EventStream) -> None:
        self._events = events
        self._stream = stream
        self._write_now = stream.write_now
        self._frames = events.frames
        self._tallies = events.tallies

    def take(self, delta: TextDelta) -> bool:
        """Unless the client is behind."""
        return self._stream.takes_more and self._write_now(self._events.of(delta))

    def take_token(self, index: int, text: str, token_id: int) -> bool:
        """Unless the client is behind."""
        frame = self._frames[index]
        tally = self._tallies[index]
        if frame is None:
            return self.take(TextDelta(text, (token_id,), index=index, num_cached_tokens=tally.num_cached_tokens))
        if not self._write_now(frame[0] + _encode(text) + frame[1] if text else b""):
            return False
        tally.num_tokens += 1
        return True


class Events:
    """Deltas to events, in pieces that are each worth one send: the last answer's end and what follows it are one.

    tallies, frames: of each choice; see `Wire.frame`. num_open: choices that have not ended. was_aborted: one of them
    was ended by its id.
    """

    def __init__(self, generation: Generation, wire: Wire) -> None:
        self._wire = wire
        self._n = generation.params.n
        self._include_usage = generation.include_usage
        self._told = generation.told
        self._continuous_usage = generation.continuous_usage
        self.tallies = generation.tallies()
        indices = range(len(self.tallies))
        self.frames = [None if generation.continuous_usage else wire.frame(index) for index in indices]
        self.num_open = len(self.tallies)
        self.was_aborted = False

    def of(self, delta: TextDelta) -> bytes:
        """The events that tell of a delta; b"" where there is nothing to tell yet."""
        tally = self.tallies[delta.index]
        if tally.has_begun and delta.finish_reason is None and not self._continuous_usage:  # nearly always
            tally.count(delta)
            return self._wire.delta(delta, None)
        begins = not tally.has_begun
        tally.count(delta)
        if not tally.has_begun:
            return b""  # it has scores of the prompt so far, which go out together
        usage = usage_of(self.tallies, self._n) if self._continuous_usage else None
        opening = b""
        if begins:
            prompt_scores = _first(self.tallies, delta.index, self._n).prompt_scores
            before = None if usage is None else less(usage, tally.num_tokens)
            opening = self._wire.opening(delta.index, tally.prompt_token_ids, prompt_scores, before)
        return opening + self._wire.delta(delta, usage) + self._end(delta)

    def _end(self, delta: TextDelta) -> bytes:
        """What follows the last delta of all."""
        self.num_open -= delta.finish_reason is not None
        self.was_aborted |= delta.finish_reason is FinishReason.ABORT
        if self.num_open > 0:
            return b""
        return self._wire.end(usage_of(self.tallies, self._n) if self._include_usage else None, self._told())


def _first(tallies: Sequence[Tally], index: int, n: int) -> Tally:
    """That of the first choice of the same prompt."""
    return tallies[index - index % n]


def _options(generation: Generation) -> dict[str, Any]:
    """With which each prompt is opened."""
    options: dict[str, Any] = {
        "starts_text": generation.starts_text,
        "markers": generation.markers,
        "cache_salt": generation.cache_salt,
        "priority": generation.priority,
        "tenant": generation.tenant,
        "lora": generation.lora,
        "timeout_s": generation.timeout_s,
        "name": generation.name,
    }
    if generation.explained is not None:
        options |= {"explain": True, "spent_s": generation.explained.spent_s}
    return options


@asynccontextmanager
async def open_all(engine: Engine, generation: Generation) -> AsyncGenerator[Mailbox]:
    """A mailbox with the deltas of all prompts, by their index. Leaving the block ends what still runs."""
    prompts, n, explained = generation.prompts, generation.params.n, generation.explained
    options = _options(generation)
    if len(prompts) == 1:
        async with engine.open(prompts[0], generation.params, **options) as mailbox:
            if explained is not None:
                explained.opened(0, mailbox.request_id)
            yield mailbox
        return
    merged = Mailbox(len(prompts) * n)

    async def forward(place: int, prompt: TokenIds) -> None:
        try:
            async with engine.open(prompt, generation.params, **options) as mailbox:
                if explained is not None:
                    explained.opened(place, mailbox.request_id)
                async for delta in mailbox:
                    merged.put(msgspec.structs.replace(delta, index=place * n + delta.index))
                if explained is not None:
                    explained.ended(place)
        except BaseException as error:  # this prompt's edge: a group of tasks would not hear of a CancelledError
            if not is_fault(error):
                raise
            merged.fail(error)

    async with task_group() as group:
        tasks = [group.create_task(forward(*item), name="aserve: one prompt") for item in enumerate(prompts)]
        yield merged
        for task in tasks:
            task.cancel()
