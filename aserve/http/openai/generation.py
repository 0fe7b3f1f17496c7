"""Running the prompts of one request, and answering whole or as a stream. How the answer is spelled is a `Wire`'s.

    prompts --> engine.open each --> Mailbox of all --> Wire --> bytes --> client

The prompts of a request run at once; when one fails, or the client leaves, all are ended and give back what they hold.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from aserve.core.errors import AserveError
from aserve.core.outputs import Completion, TextDelta
from aserve.core.params import SamplingParams
from aserve.engine import AsyncEngine
from aserve.http.endpoint import Exchange
from aserve.http.json_response import JsonResponse
from aserve.http.sse import DONE, EventStream, StreamLimits
from aserve.http.tasks import task_group
from aserve.mailbox import Mailbox

TokenIds = tuple[int, ...]


class Wire(Protocol):
    """How one API spells an answer. Everything that returns bytes returns whole events; b"" is nothing to say."""

    def opening(self, index: int, prompt_token_ids: TokenIds) -> bytes:
        """What comes before the first delta of a prompt's answer."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """What an answer gained; delta.index is the prompt's."""
        ...

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The token counts, after everything else."""
        ...

    def whole(self, completions: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompts to run with the same parameters, and whether to stream. starts_text: see `AsyncEngine.open`."""

    prompts: Sequence[TokenIds]
    params: SamplingParams
    stream: bool
    include_usage: bool
    starts_text: bool = False


async def answer(
    engine: AsyncEngine, generation: Generation, wire: Wire, exchange: Exchange, limits: StreamLimits
) -> None:
    """Run the prompts and reply. Raises `AserveError` for what goes wrong before the reply has begun."""
    async with _open_all(engine, generation, exchange.request_id) as deltas:
        if generation.stream:
            async with aclosing(_events(generation, wire, deltas)) as events:
                first = await anext(events)  # what fails until now still has an HTTP status
                await exchange.reply(EventStream(first, events, limits))
            return
        tallies = [_Tally(prompt) for prompt in generation.prompts]
        async for delta in deltas:
            tallies[delta.index].add(delta)
    body = wire.whole([tally.completion() for tally in tallies], _usage(tallies))
    await exchange.reply(JsonResponse(body))


async def _events(generation: Generation, wire: Wire, deltas: Mailbox) -> AsyncGenerator[bytes]:
    """The stream in pieces that are each worth one send: the end of the last answer, usage and [DONE] go together."""
    tallies = [_Tally(prompt) for prompt in generation.prompts]
    num_open = len(tallies)
    async for delta in deltas:
        tally = tallies[delta.index]
        opening = b"" if tally.has_begun else wire.opening(delta.index, tally.prompt_token_ids)
        events = opening + wire.delta(delta)
        tally.count(delta)
        num_open -= delta.finish_reason is not None
        if num_open == 0:
            events += (wire.usage(_usage(tallies)) if generation.include_usage else b"") + DONE
        if events:
            yield events


class _Tally:
    """What one prompt has brought so far."""

    __slots__ = ("_last", "_texts", "_token_ids", "num_cached_tokens", "num_tokens", "prompt_token_ids")

    def __init__(self, prompt_token_ids: TokenIds) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._last: TextDelta | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    @property
    def has_begun(self) -> bool:
        return self._last is not None

    def count(self, delta: TextDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens = delta.num_cached_tokens
        self._last = delta

    def add(self, delta: TextDelta) -> None:
        """Count a delta and keep what it brought."""
        self.count(delta)
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids

    def completion(self) -> Completion:
        """All that was added, after the last delta."""
        assert self._last is not None, "I19: an answer ends with a terminal delta"
        assert self._last.finish_reason is not None, "I19: an answer ends with a terminal delta"
        return Completion(
            prompt_token_ids=self.prompt_token_ids,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
        )


def _usage(tallies: Sequence[_Tally]) -> dict[str, Any]:
    num_prompt_tokens = sum(len(tally.prompt_token_ids) for tally in tallies)
    num_completion_tokens = sum(tally.num_tokens for tally in tallies)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(tally.num_cached_tokens for tally in tallies)},
    }


@asynccontextmanager
async def _open_all(engine: AsyncEngine, generation: Generation, request_id: str) -> AsyncGenerator[Mailbox]:
    """A mailbox with the deltas of all prompts, whose index is the prompt's. Leaving the block ends what still runs."""
    prompts, params = generation.prompts, generation.params
    if len(prompts) == 1:
        async with engine.open(
            prompts[0], params, request_id=request_id, starts_text=generation.starts_text
        ) as mailbox:
            yield mailbox
        return
    merged = Mailbox(len(prompts))

    async def forward(index: int, prompt: TokenIds) -> None:
        try:
            async with engine.open(prompt, params, request_id=f"{request_id}-{index}") as mailbox:
                async for delta in mailbox:
                    merged.put(msgspec.structs.replace(delta, index=index))
        except AserveError as error:
            merged.fail(error)

    async with task_group() as group:
        tasks = [group.create_task(forward(*item), name="aserve: one prompt") for item in enumerate(prompts)]
        yield merged
        for task in tasks:
            task.cancel()
