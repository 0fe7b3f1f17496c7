"""Rounds of load on a server, closed loop (so many clients, one request after another) and open loop (at given times).

Requests are rendered before the clock starts, and answers parsed after it has stopped. What they are put on is a server
(`Target`), or whatever else has a `Sender`.
"""

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from aserve.load.answers import Sample, parse
from aserve.load.arrivals import Arrival, draw_prompt
from aserve.load.http import Answer, AnswerError, Client
from aserve.load.prompts import Prompts

T = TypeVar("T")
PATH: Final = "/v1/completions"
FAILURES: Final = (AnswerError, OSError, TimeoutError)


@dataclass(frozen=True)
class Target:
    """A server, and how it wants to be asked.

    url: where its API starts, without /v1. model: the name to ask for; None leaves it out. prompts: what is sent.
    extra_body: fields added to every request. usage: ask for the token counts at the end of a stream. keep_alive: use
    connections again.
    """

    url: str
    prompts: Prompts
    model: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    stream: bool = True
    usage: bool = True
    keep_alive: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0

    def client(self) -> Client:
        """Its connections."""
        return Client(self.url, api_key=self.api_key, keep_alive=self.keep_alive, timeout_s=self.timeout_s)

    def sender(self) -> "HttpSender":
        """For a round."""
        return HttpSender(self)

    def body(self, ids: list[int], num_out: int) -> bytes:
        """A greedy request as JSON."""
        body: dict[str, Any] = {"prompt": self.prompts.render(ids), "max_tokens": num_out, "temperature": 0}
        body["stream"] = self.stream
        if self.model is not None:
            body["model"] = self.model
        if self.stream and self.usage:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body | dict(self.extra_body)).encode()


@dataclass
class Round:
    """What one round of load brought. late_s: how long after it was due each request was sent.

    num_short: answers with fewer tokens than were asked for. cpu_s: what the client itself took of the processor.
    """

    num_asked: int
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    num_short: int = 0
    num_retries: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def check(self) -> None:
        """Raises AnswerError where a request failed."""
        if self.failures:
            raise AnswerError(f"{len(self.failures)} of {self.num_asked} requests failed: {self.failures[0]}")


def together(rounds: Sequence[Round]) -> Round:
    """Rounds that ran at the same time, as one."""
    done = Round(0, wall_s=max(each.wall_s for each in rounds), cpu_s=max(each.cpu_s for each in rounds))
    for each in rounds:
        done.num_asked += each.num_asked
        done.samples += each.samples
        done.failures += each.failures
        done.late_s += each.late_s
        done.num_short += each.num_short
        done.num_retries += each.num_retries
    return done


class Sender(Protocol):
    """Sends a round's requests, prepared before the clock starts; what came is read when it has stopped."""

    @property
    def num_retries(self) -> int:
        """Requests that were sent once more, since a kept connection had been closed."""
        ...

    def prepare(self, ids: list[int], num_out: int) -> Any:
        """A request for so many tokens after these, as `send` takes it."""
        ...

    async def send(self, prepared: Any) -> Any:
        """What came back, as `read` takes it. Raises one of FAILURES."""
        ...

    def read(self, received: Any, due_s: float) -> Sample:
        """What it says. Raises AnswerError where it is no answer."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Loadable(Protocol):
    """What load is put on. prompts: what it is asked."""

    @property
    def prompts(self) -> Prompts:
        """As above."""
        ...

    def sender(self) -> Sender:
        """For a round."""
        ...


class HttpSender:
    """Of requests to a server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = target.client()

    @property
    def num_retries(self) -> int:
        """As a `Sender`."""
        return self._client.num_retries

    def prepare(self, ids: list[int], num_out: int) -> bytes:
        """The request's bytes."""
        return self._client.render(PATH, self._target.body(ids, num_out))

    async def send(self, prepared: bytes) -> Answer:
        """The answer's bytes, each read with its time."""
        return await self._client.post(prepared)

    def read(self, received: Answer, due_s: float) -> Sample:
        """From its events."""
        return parse(received, due_s, stream=self._target.stream)

    def close(self) -> None:
        """The connections."""
        self._client.close()


@dataclass(slots=True)
class _Job:
    """A prepared request, when it comes in an open loop, and then: when it was due, and what came back."""

    request: Any
    num_out: int
    at_s: float
    due_s: float = 0.0
    received: Any = None
    failure: str = ""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed: a read takes half of the processor time of asyncio's own loop."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # it is not made for Windows
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def closed_loop(
    target: Loadable, arrivals: Sequence[Arrival], concurrency: int, rng: random.Random, salt: int = 0
) -> Round:
    """`concurrency` clients send these requests, each its next when one has ended; their times play no part."""
    sender = target.sender()
    jobs = _prepared(target, sender, arrivals, rng, salt)
    waiting = iter(jobs)

    async def one_client() -> None:
        for job in waiting:
            await _send(sender, job, time.perf_counter())

    return await _timed(sender, jobs, [one_client() for _ in range(concurrency)])


async def open_loop(target: Loadable, arrivals: Sequence[Arrival], rng: random.Random, salt: int = 0) -> Round:
    """Requests at their times, however many are open. salt: rounds of equal salts share the prompts' common blocks."""
    sender = target.sender()
    jobs = _prepared(target, sender, arrivals, rng, salt)
    start_s = time.perf_counter()

    async def at_its_time(job: _Job) -> None:
        due_s = start_s + job.at_s
        await asyncio.sleep(due_s - time.perf_counter())
        await _send(sender, job, due_s)

    return await _timed(sender, jobs, [at_its_time(job) for job in jobs])


def _prepared(
    target: Loadable, sender: Sender, arrivals: Sequence[Arrival], rng: random.Random, salt: int
) -> list[_Job]:
    return [
        _Job(sender.prepare(draw_prompt(one, target.prompts, rng, salt), one.num_out), one.num_out, one.at_s)
        for one in arrivals
    ]


async def _send(sender: Sender, job: _Job, due_s: float) -> None:
    job.due_s = due_s
    try:
        job.received = await sender.send(job.request)
    except FAILURES as error:
        job.failure = f"{type(error).__name__}: {error}"


async def _timed(sender: Sender, jobs: Sequence[_Job], work: Sequence[Coroutine[Any, Any, None]]) -> Round:
    """Do the work against the clock, then read what came back."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
    done = Round(len(jobs), wall_s=time.perf_counter() - start_s, cpu_s=time.process_time() - start_cpu_s)
    sender.close()
    done.num_retries = sender.num_retries
    for job in jobs:
        if job.failure:
            done.failures.append(job.failure)
            continue
        try:
            sample = sender.read(job.received, job.due_s)
        except AnswerError as error:
            done.failures.append(str(error))
            continue
        done.samples.append(sample)
        done.late_s.append(sample.sent_s - sample.due_s)
        done.num_short += sample.num_out < job.num_out
    return done
