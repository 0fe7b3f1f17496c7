"""Tokens per second of chat answers that are parsed for calls of tools, and of plain ones, from one server in turns.

All are streamed, of the same length, and to the same conversations. One JSON line: medians of the rounds, and of their
ratios.

    python scripts/bench_tools.py --model models/tiny --streams 32 --rounds 20
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from load.process import Server, exit_on_sigterm, free_port
from report import emit

from aserve.load.http import Answer, Client

PATH: Final = "/v1/chat/completions"
TEMPLATE: Final = """{% for tool in tools or () %}{% endfor %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""It takes tools and says nothing of them, so that both kinds of answers have the same prompts."""
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def body(model: str, stream: int, max_tokens: int, *, is_parsed: bool) -> bytes:
    """A request as JSON. Sampled, so that a model of random weights says many things."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{stream}. How is the weather in Oslo?"}],
        "max_tokens": max_tokens,
        "seed": stream,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields | {"tools": [WEATHER], "tool_choice": "auto"} if is_parsed else fields).encode()


def num_tokens(answer: Answer) -> int:
    """As its last event but [DONE] says. Raises ValueError for an answer without."""
    lines = [line for line in answer.body.splitlines() if line.startswith(b"data: {")]
    if answer.status != 200 or not lines:
        raise ValueError(f"status {answer.status}: {answer.body[:200]!r}")
    return int(json.loads(lines[-1].removeprefix(b"data: "))["usage"]["completion_tokens"])


async def tokens_per_s(client: Client, requests: Sequence[bytes]) -> float:
    """Of these requests at once."""
    start_s = time.perf_counter()
    answers = await asyncio.gather(*map(client.post, requests))
    took_s = time.perf_counter() - start_s
    return sum(map(num_tokens, answers)) / took_s


async def run(url: str, args: argparse.Namespace) -> dict[bool, list[float]]:
    """Tokens per second by round, of plain answers and of those that are parsed."""
    client = Client(url)
    requests = {
        is_parsed: [
            client.render(PATH, body(Path(args.model).name, stream, args.max_tokens, is_parsed=is_parsed))
            for stream in range(args.streams)
        ]
        for is_parsed in (False, True)
    }
    rates: dict[bool, list[float]] = {False: [], True: []}
    for kind in requests.values():
        await tokens_per_s(client, kind)  # warms up
    for turn in range(args.rounds):
        for is_parsed in (False, True) if turn % 2 else (True, False):
            rates[is_parsed].append(await tokens_per_s(client, requests[is_parsed]))
    client.close()
    return rates


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--parser", default="hermes", help="--tool-call-parser of the server")
    args = parser.parse_args(words)
    exit_on_sigterm()
    port = free_port()
    command = [sys.executable, "-m", "aserve", "serve", "--model", args.model, "--port", str(port)]
    command += ["--tool-call-parser", args.parser, "--served-model-name", Path(args.model).name]
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        with Server([*command, "--chat-template", str(template)], port, Path(folder) / "log") as server:
            server.wait_for("/ready", 120.0)
            rates = asyncio.run(run(server.url, args))
    emit(
        "tools",
        {"model": args.model, "parser": args.parser, "streams": args.streams, "rounds": args.rounds},
        {
            "tokens_per_s": median(rates[True]),
            "plain_tokens_per_s": median(rates[False]),
            "ratio": median(a / b for a, b in zip(rates[True], rates[False], strict=True)),
        },
    )


if __name__ == "__main__":
    main()
