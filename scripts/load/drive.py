"""Rounds of load on a server, closed loop (so many clients, one request after another) and open loop (at given times).

Requests are rendered before the clock starts, and answers parsed after it has stopped.
"""

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import uvloop

from load.answers import Sample, parse
from load.arrivals import Arrival, draw_prompt
from load.http import Answer, AnswerError, Client
from load.prompts import Prompts

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


@dataclass(slots=True)
class _Job:
    """A rendered request, when it comes in an open loop, and then: when it was due, and what came back."""

    request: bytes
    num_out: int
    at_s: float
    due_s: float = 0.0
    answer: Answer | None = None
    failure: str = ""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop, which takes half of the processor time that asyncio's own loop takes for a read."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def closed_loop(
    target: Target, arrivals: Sequence[Arrival], concurrency: int, rng: random.Random, salt: int = 0
) -> Round:
    """`concurrency` clients send these requests, each its next when one has ended; their times play no part."""
    client = target.client()
    jobs = _rendered(target, client, arrivals, rng, salt)
    waiting = iter(jobs)

    async def one_client() -> None:
        for job in waiting:
            await _send(client, job, time.perf_counter())

    return await _timed(target, client, jobs, [one_client() for _ in range(concurrency)])


async def open_loop(target: Target, arrivals: Sequence[Arrival], rng: random.Random, salt: int = 0) -> Round:
    """Requests at their times, however many are open. salt: rounds of equal salts share the prompts' common blocks."""
    client = target.client()
    jobs = _rendered(target, client, arrivals, rng, salt)
    start_s = time.perf_counter()

    async def at_its_time(job: _Job) -> None:
        due_s = start_s + job.at_s
        await asyncio.sleep(due_s - time.perf_counter())
        await _send(client, job, due_s)

    return await _timed(target, client, jobs, [at_its_time(job) for job in jobs])


def _rendered(target: Target, client: Client, arrivals: Sequence[Arrival], rng: random.Random, salt: int) -> list[_Job]:
    jobs = []
    for one in arrivals:
        body = target.body(draw_prompt(one, target.prompts, rng, salt), one.num_out)
        jobs.append(_Job(client.render(PATH, body), one.num_out, one.at_s))
    return jobs


async def _send(client: Client, job: _Job, due_s: float) -> None:
    job.due_s = due_s
    try:
        job.answer = await client.post(job.request)
    except FAILURES as error:
        job.failure = f"{type(error).__name__}: {error}"


async def _timed(
    target: Target, client: Client, jobs: Sequence[_Job], work: Sequence[Coroutine[Any, Any, None]]
) -> Round:
    """Do the work against the clock, then read what came back."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
    done = Round(len(jobs), wall_s=time.perf_counter() - start_s, cpu_s=time.process_time() - start_cpu_s)
    client.close()
    done.num_retries = client.num_retries
    for job in jobs:
        if job.answer is None:
            done.failures.append(job.failure)
            continue
        try:
            sample = parse(job.answer, job.due_s, stream=target.stream)
        except AnswerError as error:
            done.failures.append(str(error))
            continue
        done.samples.append(sample)
        done.late_s.append(sample.sent_s - sample.due_s)
        done.num_short += sample.num_out < job.num_out
    return done
