"""Closed-loop load on any OpenAI-compatible server: time to first token, inter-token latency, tokens per second.

At each concurrency c, c clients send streamed /v1/completions requests one after another. Prompts are random token ids
(or random words with --text, for servers that refuse ids), fresh in every request, so that no prefix cache helps.
A token's time is when its bytes were read; events are parsed after the run, to keep the client cheap. One JSON line a
concurrency: the medians of --rounds rounds.

    python scripts/bench_serving.py --url http://127.0.0.1:8000 --concurrency 1 8 32
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
from report import emit, percentile


@dataclass
class Answer:
    """What one request brought: when it was sent, and (time, body bytes) of every read."""

    sent_s: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    first_token_s: float = float("nan")
    last_token_s: float = float("nan")
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def parse(self) -> None:
        """Turn the recorded bytes into token times; the usage chunk, where there is one, gives the token count."""
        num_events = 0
        for now, line in self._lines():
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise SystemExit(f"the server answered an error in the stream: {event['error']}")
            if usage := event.get("usage"):
                self.num_tokens = usage["completion_tokens"]
            if not event.get("choices") or (num_events and not event["choices"][0].get("text")):
                continue
            if num_events == 0:
                self.first_token_s = now
            else:
                self.gaps_s.append(now - self.last_token_s)
            self.last_token_s = now
            num_events += 1
        self.num_tokens = self.num_tokens or num_events

    def _lines(self) -> list[tuple[float, bytes]]:
        lines, rest = [], b""
        for now, data in self.reads:
            *whole, rest = (rest + data).split(b"\n")
            lines += [(now, line.rstrip(b"\r")) for line in whole if line.strip()]
        return lines


class Connection:
    """A kept-alive HTTP/1.1 connection that reads bodies as they come."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._h11 = h11.Connection(h11.CLIENT)

    async def post(self, path: str, body: bytes, headers: list[tuple[str, str]]) -> Answer:
        """Send one request and read its whole answer. Ends the program on any status but 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
            self._h11 = h11.Connection(h11.CLIENT)
        reader, writer = self._streams
        all_headers = [("Host", self._host), ("Content-Length", str(len(body))), *headers]
        answer = Answer(time.perf_counter())
        for sent in (h11.Request(method="POST", target=path, headers=all_headers), h11.Data(body), h11.EndOfMessage()):
            writer.write(self._h11.send(sent) or b"")
        status = 0
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                self._h11.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer.reads.append((time.perf_counter(), bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise SystemExit(f"the server ended the connection: {event}")
        if status != 200:
            raise SystemExit(f"status {status}: {b''.join(data for _, data in answer.reads)[:300]!r}")
        if self._h11.our_state is h11.MUST_CLOSE or self._h11.their_state is h11.MUST_CLOSE:
            self.close()
        else:
            self._h11.start_next_cycle()
        return answer

    def close(self) -> None:
        """Close; the next post opens anew."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def make_body(args: argparse.Namespace, rng: random.Random) -> bytes:
    """One request as JSON."""
    prompt: Any = [rng.randrange(*args.token_range) for _ in range(args.input_len)]
    if args.text:
        prompt = " ".join(rng.choice(("the", "a", "one", "two", "red", "sun", "sea", "old")) for _ in prompt)
    body = {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": args.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.extra_body,
    }
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


async def run_round(args: argparse.Namespace, concurrency: int, rng: random.Random) -> dict[str, float]:
    """Answer all requests of one round with `concurrency` clients; the figures of the round."""
    url = urlsplit(args.url)
    path = url.path.rstrip("/") + "/v1/completions"
    headers = [("Content-Type", "application/json")]
    if args.api_key:
        headers.append(("Authorization", f"Bearer {args.api_key}"))
    num_requests = max(args.min_requests, concurrency * args.waves)
    bodies = iter([make_body(args, rng) for _ in range(num_requests)])
    answers: list[Answer] = []

    async def client() -> None:
        connection = Connection(url.hostname or "127.0.0.1", url.port or 80)
        for body in bodies:
            answers.append(await connection.post(path, body, headers))  # noqa: PERF401  several clients share it
        connection.close()

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    wall_s = time.perf_counter() - start_s
    for answer in answers:
        answer.parse()
    first_ms = [1e3 * (a.first_token_s - a.sent_s) for a in answers]
    gaps_ms = [1e3 * gap for a in answers for gap in a.gaps_s]
    num_tokens = sum(a.num_tokens for a in answers)
    return {
        "requests": float(num_requests),
        "output_tokens_per_s": num_tokens / wall_s,
        "ttft_p50_ms": percentile(first_ms, 50),
        "ttft_p99_ms": percentile(first_ms, 99),
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "tokens_per_event": num_tokens / (len(gaps_ms) + len(answers)),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="the name to ask for; the server's own when omitted")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2, help="requests per client in a round")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true", help="send words instead of token ids")
    parser.add_argument("--token-range", type=int, nargs=2, default=(300, 1000), help="ids are drawn from [low, high)")
    parser.add_argument("--extra-body", type=json.loads, default={"ignore_eos": True}, help="JSON merged into requests")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    warm_up = argparse.Namespace(**{**vars(args), "waves": 1, "min_requests": 2})
    await run_round(warm_up, 1, rng)
    for concurrency in args.concurrency:
        rounds = [await run_round(args, concurrency, rng) for _ in range(args.rounds)]
        figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        config = {"concurrency": concurrency, "input_len": args.input_len, "output_len": args.output_len}
        emit("serving", {**config, "rounds": args.rounds, "extra_body": args.extra_body}, figures)


if __name__ == "__main__":
    asyncio.run(main())
