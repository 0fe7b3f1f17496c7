"""Replicas under fire: 64 streams over 2 of them, one killed, one drained, scaled to 3 and back; every answer counted.

    aserve ray run --model demo --replicas 2 --port 8123 &
    python scripts/ray_live.py --url http://127.0.0.1:8123 --part kill

Needs a cluster of this machine. Each part prints what became of each answer, and ends with 1 where one is not accounted
for. Parts: streams, kill, drain, leave, retry, busy, scale, route, whole.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai

PROMPT = "Tell me a long story about a number."
BEGUN = 8
"""Streams that have begun when a replica is hit."""
NUM_LEAST = 2
"""Replicas where nothing is to do, for `scale`."""
NUM_TALKS, NUM_TURNS, WORDS_A_TURN = 8, 3, 80
"""Conversations at once, of so many turns, each of which adds so many words to the prompt."""
WORDS = PROMPT.split()
HIT_GAIN = 1.5
PARTS: dict[str, Callable[["Live"], Awaitable[None]]] = {}


def part(function: Callable[["Live"], Awaitable[None]]) -> Callable[["Live"], Awaitable[None]]:
    PARTS[function.__name__] = function
    return function


class Live:
    """A server of replicas, and clients of it."""

    def __init__(self, url: str, model: str, streams: int, tokens: int) -> None:
        self.url, self.model, self.num_streams, self.num_tokens = url, model, streams, tokens
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0)
        self.http = httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=None))
        self.failures: list[str] = []

    def check(self, holds: bool, told: str) -> None:
        """Note what should hold."""
        print(f"  {'ok    ' if holds else 'FAILED'} {told}", flush=True)
        if not holds:
            self.failures.append(told)

    async def stream(self, index: int, tokens: int | None = None, answer: "Answer | None" = None) -> "Answer":
        """One answer, to its end. answer: to be filled in as it comes."""
        answer = answer or Answer()
        try:
            stream = await self.openai.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": f"{index}. {PROMPT}"}],
                max_tokens=tokens or self.num_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            answer.replica = stream.response.headers.get("x-aserve-replica", "")
            async for chunk in stream:
                answer.first_s = answer.first_s or time.monotonic()
                for choice in chunk.choices:
                    answer.num_chunks += bool(choice.delta.content)
                    answer.finish = choice.finish_reason or answer.finish
        except openai.APIStatusError as error:
            answer.error = f"status {error.status_code}"
        except openai.APIError as error:  # an error event in the stream, or a connection that is cut
            answer.error = str(error.code) if error.code else f"cut: {type(error).__name__} {error}"
        except httpx.HTTPError as error:
            answer.error = f"cut: {type(error).__name__}"
        return answer

    async def replicas(self) -> dict[str, Any]:
        """As /health tells of them, by name."""
        answer = await self.http.get("/health")
        return {each["replica"]: each for each in answer.json().get("replicas", [])}

    async def until(self, holds: Callable[[dict[str, Any]], bool], told: str, timeout_s: float = 300.0) -> float:
        """Wait until the replicas are so; how long it took."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < timeout_s:
            try:
                if holds(await self.replicas()):
                    break
            except (httpx.HTTPError, ValueError):
                pass
            await asyncio.sleep(0.5)
        took_s = time.monotonic() - start_s
        self.check(took_s < timeout_s, f"{told} after {took_s:.1f} s")
        return took_s


class Answer:
    """What came of a request."""

    def __init__(self) -> None:
        self.replica, self.finish, self.error = "", "", ""
        self.num_chunks, self.first_s = 0, 0.0

    @property
    def outcome(self) -> str:
        """How it ended: the finish reason, or what went wrong."""
        return self.error or self.finish or "cut"


def tally(answers: list[Answer]) -> str:
    """How many ended how, by replica."""
    counts = Counter((answer.replica or "none", answer.outcome) for answer in answers)
    return ", ".join(f"{replica}: {count} {outcome}" for (replica, outcome), count in sorted(counts.items()))


@part
async def streams(live: Live) -> None:
    """All streams at once; each has all of its events."""
    start_s = time.monotonic()
    answers = await asyncio.gather(*(live.stream(index) for index in range(live.num_streams)))
    took_s = time.monotonic() - start_s
    print(f"  {tally(answers)}; {took_s:.1f} s, {live.num_streams * live.num_tokens / took_s:.0f} tokens/s")
    live.check(all(answer.outcome == "length" for answer in answers), "every stream came to its end")
    live.check(len({answer.replica for answer in answers}) > 1, "more than one replica answered")


async def _under_streams(live: Live, signum: int) -> tuple[list[Answer], str]:
    """Send a signal to one replica when some streams have begun."""
    pids = {name: each["pid"] for name, each in (await live.replicas()).items()}
    answers = [Answer() for _ in range(live.num_streams)]
    tasks = [asyncio.create_task(live.stream(index, answer=answer)) for index, answer in enumerate(answers)]
    while sum(answer.first_s > 0 for answer in answers) < min(BEGUN, live.num_streams):  # noqa: ASYNC110  what is looked at are fields
        await asyncio.sleep(0.005)
    begun = Counter(answer.replica for answer in answers if answer.first_s)
    victim = begun.most_common(1)[0][0]
    print(f"  begun: {dict(begun)}; signal {signum} to {victim}")
    os.kill(pids[victim], signum)
    late = [asyncio.create_task(live.stream(1000 + index, 8)) for index in range(8)]
    return list(await asyncio.gather(*tasks, *late)), victim


@part
async def kill(live: Live) -> None:
    """SIGKILL: its streams end with an error event, others are whole, and it is back without a hand."""
    num_before = len(await live.replicas())
    answers, victim = await _under_streams(live, signal.SIGKILL)
    print(f"  {tally(answers)}")
    ours = [answer for answer in answers if answer.replica == victim]
    live.check(
        bool(ours) and all(answer.outcome == "replica_lost" for answer in ours), "its streams end with an error event"
    )
    others = [answer for answer in answers if answer.replica != victim]
    live.check(
        all(answer.outcome == "length" for answer in others), "all others are whole, those that came later among them"
    )
    await live.until(lambda found: len(found) == num_before and victim not in found, "there are as many replicas again")


@part
async def drain(live: Live) -> None:
    """SIGTERM: its streams are finished, newcomers go elsewhere, and it is replaced."""
    num_before = len(await live.replicas())
    answers, victim = await _under_streams(live, signal.SIGTERM)
    print(f"  {tally(answers)}")
    live.check(all(answer.outcome == "length" for answer in answers), "every answer is whole")
    live.check(any(answer.replica == victim for answer in answers), "those that it had begun among them")
    await live.until(lambda found: len(found) == num_before and victim not in found, "it has been replaced")


@part
async def leave(live: Live) -> None:
    """A client that leaves its stream: the replica computes no more for it."""
    async with live.http.stream(
        "POST",
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 700,
            "stream": True,
            "ignore_eos": True,
        },
    ) as response:
        live.check(response.status_code == 200, f"status {response.status_code}")
        pieces = response.aiter_bytes()
        await anext(pieces)
        found = await live.replicas()
        live.check(
            sum(each["num_open"] for each in found.values()) == 1,
            f"one request is open: { {name: each['num_open'] for name, each in found.items()} }",
        )
    await live.until(lambda found: all(each["num_open"] == 0 for each in found.values()), "nothing is open", 20.0)


@part
async def retry(live: Live) -> None:
    """An Idempotency-Key: a retry of a running and of a finished request gets the same bytes."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64, "stream": True}
    headers = {"Idempotency-Key": f"live-{time.time()}"}
    asked = [live.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
    running = await asyncio.gather(*asked)
    finished = await live.http.post("/v1/chat/completions", json=body, headers=headers)
    contents = {answer.content for answer in (*running, finished)}
    live.check(len(contents) == 1 and running[0].status_code == 200, "three requests, one answer")
    live.check(finished.headers.get("idempotent-replayed") == "true", "the last was replayed")


@part
async def busy(live: Live) -> None:
    """Far more than fits: refused with 429 and Retry-After, and what is taken is answered."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": live.num_tokens, "ignore_eos": True}
    asked = [live.http.post("/v1/chat/completions", json=body) for _ in range(600)]
    answers = await asyncio.gather(*asked)
    counts = Counter(answer.status_code for answer in answers)
    print(f"  {dict(counts)}")
    refused = [answer for answer in answers if answer.status_code == 429]
    live.check(set(counts) <= {200, 429} and bool(refused), "answered or refused (start it with small queues)")
    live.check(all("retry-after" in answer.headers for answer in refused), "with Retry-After")


@part
async def scale(live: Live) -> None:
    """A queue of tokens: one replica more, and one less when it is gone (start with --min-replicas 2 and 3 at most)."""
    await live.until(lambda found: len(found) == NUM_LEAST, f"{NUM_LEAST} replicas, all others of earlier load gone,")
    stop = asyncio.Event()
    answers: list[Answer] = []

    async def ask(index: int) -> None:
        while not stop.is_set():
            answers.append(await live.stream(index, 64))
            index += 1000

    tasks = [asyncio.create_task(ask(index)) for index in range(live.num_streams)]
    await live.until(lambda found: len(found) == NUM_LEAST + 1, f"{NUM_LEAST + 1} replicas")
    stop.set()
    await asyncio.gather(*tasks)
    print(f"  {tally(answers)}")
    live.check(all(answer.outcome == "length" for answer in answers), "every answer is whole while it grows")
    await live.until(lambda found: len(found) == NUM_LEAST, f"{NUM_LEAST} replicas again")


@part
async def route(live: Live) -> None:
    """Conversations go where they are cached: more is found than where each turn is sent to another replica."""
    names = sorted(await live.replicas())

    async def talk(number: int, *, is_routed: bool) -> int:
        """Tokens that were found cached, over all turns."""
        words = random.Random(f"{time.time()} {number}")
        prompt, num_cached = "", 0
        for turn in range(NUM_TURNS):
            prompt += " ".join(words.choice(WORDS) for _ in range(WORDS_A_TURN)) + " "
            headers = {} if is_routed else {"X-Aserve-Replica": names[(number + turn) % len(names)]}
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = await live.http.post("/v1/completions", json=body, headers=headers)
            answer.raise_for_status()
            num_cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    found = {}
    for is_routed in (False, True):
        talks = (talk(number, is_routed=is_routed) for number in range(NUM_TALKS))
        found[is_routed] = sum(await asyncio.gather(*talks))
    told = f"cached tokens {found[True]}, beside {found[False]} of a replica after the other (goal {HIT_GAIN} x)"
    live.check(found[True] >= HIT_GAIN * found[False], told)


@part
async def whole(live: Live) -> None:
    """/metrics of all replicas by label, /health and /ready of the whole."""
    names = set(await live.replicas())
    text = (await live.http.get("/metrics")).text
    live.check(all(f'replica="{name}"' in text for name in names), "metrics of each replica")
    ready = await live.http.get("/ready")
    live.check(ready.status_code == 200 and len(ready.json()["replicas"]) == len(names), "ready, with all replicas")


async def run(live: Live, names: list[str]) -> int:
    for name in names:
        print(f"{name}: {PARTS[name].__doc__}", flush=True)
        await PARTS[name](live)
    await live.http.aclose()
    print("all accounted for" if not live.failures else f"{len(live.failures)} failures")
    return 1 if live.failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8123")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=["streams", "kill", "drain", "leave", "retry", "whole"]
    )
    given = parser.parse_args()
    sys.exit(asyncio.run(run(Live(given.url, given.model, given.streams, given.tokens), given.part)))
