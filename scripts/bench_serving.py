"""Load on any OpenAI-compatible server: time to first token, inter-token latency, tokens per second, goodput.

Closed loop, the default: at each concurrency c, c clients send requests one after another. Open loop: requests come at
times of their own, Poisson with --rate, or as recorded with --trace (Azure's and Mooncake's LLM traces), --trace-speed
times as fast and --length-scale times as long. Times count from when a request was due.

Prompts are random token ids, fresh in every request, so that no prefix cache helps but where a trace shares prefixes;
with --text they are words that --tokenizer turns back into as many ids. One JSON line a load: medians of --rounds
rounds. Exit status 1 where a request failed.

    python scripts/bench_serving.py --url http://127.0.0.1:8000 --concurrency 1 8 32 128
    python scripts/bench_serving.py --rate 4 --requests 100 --slo-ttft-ms 500 --slo-itl-ms 50
    python scripts/bench_serving.py --trace azure.csv.gz --trace-seconds 600 --trace-speed 10 --length-scale 0.1
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from report import emit

from aserve.load.arrivals import Arrival, poisson, read_trace, scale, window
from aserve.load.drive import Round, Target, closed_loop, open_loop, run
from aserve.load.figures import Limits, medians, of_round
from aserve.load.prompts import Prompts


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="the name to ask for; the server's own when omitted")
    add_target(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="clients of the closed loop")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2, help="requests per client in a round")
    parser.add_argument("--min-requests", type=int, default=8, help="of a round of the closed loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-stream", action="store_true", help="whole answers; the first token is then the last")
    parser.add_argument("--rate", type=float, help="open loop: requests per second, Poisson")
    parser.add_argument("--requests", type=int, default=32, help="of a round with --rate")
    parser.add_argument("--slo-ttft-ms", type=float, default=inf, help="goodput: the first token within this time")
    parser.add_argument("--slo-itl-ms", type=float, default=inf, help="goodput: mean time of the tokens after it")
    add_trace(parser)
    return parser.parse_args(words)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Options that say how a server wants to be asked; `target_of` reads them, and url and model."""
    parser.add_argument("--api-key")
    parser.add_argument("--text", action="store_true", help="send text instead of token ids; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder: prompts are of its words")
    parser.add_argument("--token-range", type=int, nargs=2, default=(300, 1000), help="ids are drawn from [low, high)")
    parser.add_argument(
        "--extra-body", type=json.loads, default={"ignore_eos": True}, help="JSON merged into requests; {} for none"
    )
    parser.add_argument("--no-usage", action="store_true", help="do not ask for token counts; events are counted")
    parser.add_argument("--no-keepalive", action="store_true", help="a new connection for every request")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one request")
    parser.add_argument("--seed", type=int, default=0)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Options that say which stretch of a recorded trace is replayed; `arrivals_of` reads them."""
    parser.add_argument("--trace", type=Path, help="open loop: a recorded trace, .csv or .jsonl, perhaps with .gz")
    parser.add_argument("--trace-start", type=float, default=0, help="seconds into the recording")
    parser.add_argument("--trace-seconds", type=float, default=60, help="seconds of the recording")
    parser.add_argument("--trace-speed", type=float, default=1, help="times as fast as recorded")
    parser.add_argument("--length-scale", type=float, default=1, help="times as many tokens as recorded")
    parser.add_argument("--max-input-len", type=int, default=1024, help="longer prompts of the trace are cut to this")
    parser.add_argument("--max-output-len", type=int, default=512, help="longer answers of the trace are cut to this")


def target_of(args: argparse.Namespace) -> Target:
    """Whom the command line names."""
    if args.text and args.tokenizer is None:
        raise SystemExit("--text needs --tokenizer: prompts as text have an exact length only by its words")
    prompts = (
        Prompts.of_tokenizer(args.tokenizer, as_text=args.text) if args.tokenizer else Prompts(range(*args.token_range))
    )
    return Target(
        args.url,
        prompts,
        model=args.model,
        extra_body=args.extra_body,
        stream=not getattr(args, "no_stream", False),
        usage=not args.no_usage,
        keep_alive=not args.no_keepalive,
        api_key=args.api_key,
        timeout_s=args.timeout,
    )


def arrivals_of(args: argparse.Namespace, rng: random.Random) -> list[Arrival]:
    """The open loop of the command line, for one round."""
    if args.trace is None:
        return poisson([Arrival(0.0, args.input_len, args.output_len)] * args.requests, args.rate, rng)
    recorded = window(read_trace(args.trace), args.trace_start, args.trace_seconds)
    if not recorded:
        raise SystemExit(f"{args.trace}: nothing in {args.trace_seconds:g} s from {args.trace_start:g} s on")
    return scale(
        recorded,
        speed=args.trace_speed,
        length=args.length_scale,
        max_in=args.max_input_len,
        max_out=args.max_output_len,
    )


def report_load(args: argparse.Namespace, config: dict[str, Any], rounds: Sequence[Round]) -> bool:
    """Print the line of one load; whether all requests were answered."""
    limits = (
        None if args.slo_ttft_ms == args.slo_itl_ms == inf else Limits(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3)
    )
    figures = medians([of_round(done, limits) for done in rounds])
    failures = [failure for done in rounds for failure in done.failures]
    if failures:
        config |= {"first_error": failures[0]}
    if limits is not None:
        config |= {"slo_ttft_ms": args.slo_ttft_ms, "slo_itl_ms": args.slo_itl_ms}
    config |= {"url": args.url, "stream": not args.no_stream, "text": args.text, "rounds": args.rounds}
    emit("serving", config | {"extra_body": args.extra_body}, figures)
    return not failures


async def measure(args: argparse.Namespace) -> bool:
    """All loads of the command line, one after the other; whether all requests were answered."""
    target, rng = target_of(args), random.Random(args.seed)
    request = Arrival(0.0, args.input_len, args.output_len)
    await closed_loop(target, [request] * 2, 1, rng)  # the first requests are slower
    if args.trace is not None or args.rate is not None:
        loads = [arrivals_of(args, rng) for _ in range(args.rounds)]
        rounds = [await open_loop(target, arrivals, rng, salt) for salt, arrivals in enumerate(loads)]
        return report_load(args, open_config(args), rounds)
    answered = True
    for concurrency in args.concurrency:
        requests = [request] * max(args.min_requests, concurrency * args.waves)
        rounds = [await closed_loop(target, requests, concurrency, rng) for _ in range(args.rounds)]
        config = {
            "load": "closed",
            "concurrency": concurrency,
            "input_len": args.input_len,
            "output_len": args.output_len,
        }
        answered &= report_load(args, config, rounds)
    return answered


def open_config(args: argparse.Namespace) -> dict[str, Any]:
    """What identifies an open loop in its line."""
    if args.trace is None:
        return {"load": "poisson", **{name: getattr(args, name) for name in ("rate", "input_len", "output_len")}}
    names = ("trace_start", "trace_seconds", "trace_speed", "length_scale", "max_input_len", "max_output_len")
    return {"load": args.trace.name, **{name: getattr(args, name) for name in names}}


def main() -> None:
    sys.exit(0 if run(measure(parse_arguments())) else 1)


if __name__ == "__main__":
    main()
