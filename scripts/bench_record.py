"""What recording costs: tokens a second with a recording over those without, of engines that take turns.

Closed loops of --concurrency requests each, in this process; each round has one engine that is not recorded and one
that is, the first of them in turn. One JSON line: the ratios' median and spread, and bytes of the file a token.

    python scripts/bench_record.py --model demo --concurrency 32 --rounds 9
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from report import emit

from aserve import AsyncEngine, SamplingParams

NUM_PROMPT = 32


async def tokens_per_s(engine: AsyncEngine, concurrency: int, num_tokens: int) -> float:
    """Of so many answers at once."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    async def ask(number: int) -> None:
        async with engine.open([10 + number, *range(20, 20 + NUM_PROMPT)], params) as mailbox:
            async for _ in mailbox:
                pass

    started_s = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(concurrency)))
    return concurrency * num_tokens / (time.perf_counter() - started_s)


async def ratios(
    model: str, concurrency: int, num_tokens: int, rounds: int, recorded: dict[str, bool]
) -> tuple[list[float], float]:
    """Recorded over not, round by round; and bytes of the file for each token."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rec"
        async with AsyncEngine(model) as plain, AsyncEngine(model, record=path, **recorded) as taped:  # type: ignore[arg-type]
            for engine in (plain, taped):
                await tokens_per_s(engine, concurrency, num_tokens)
            for number in range(rounds):
                pair = (plain, taped) if number % 2 else (taped, plain)
                speeds = {engine: await tokens_per_s(engine, concurrency, num_tokens) for engine in pair}
                found.append(speeds[taped] / speeds[plain])
        return found, path.stat().st_size / ((rounds + 1) * concurrency * num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--logprobs", action="store_true")
    arguments = parser.parse_args()
    recorded = {"record_prompts": arguments.prompts, "record_logprobs": arguments.logprobs}
    found, bytes_per_token = asyncio.run(
        ratios(arguments.model, arguments.concurrency, arguments.tokens, arguments.rounds, recorded)
    )
    quarter = statistics.quantiles(found, n=4) if len(found) > 1 else [found[0]] * 3
    figures = {
        "ratio_p50": statistics.median(found),
        "ratio_p25": quarter[0],
        "ratio_p75": quarter[2],
        "bytes_per_token": bytes_per_token,
    }
    emit("record", vars(arguments), figures)


if __name__ == "__main__":
    main()
