"""What adapters cost: streams over several of them, and the same streams of the model as it is, in turns in one engine.

    python scripts/bench_lora.py MODEL --streams 32 --adapters 8 --rank 16

Adapters are drawn at random, for all linear layers. Prints tokens/s of each turn, and the ratio of the medians.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from load.adapters import write_adapters

from aserve import AsyncEngine, SamplingParams


async def tokens_per_s(engine: AsyncEngine, options: argparse.Namespace, adapters: list[str | None]) -> float:
    """Of all streams together, prompts of their own included. Stream i has the adapter i, counted round."""
    draw = random.Random(time.time_ns())
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [[draw.randrange(1000) for _ in range(options.prompt_tokens)] for _ in range(options.streams)]
    start = time.perf_counter()
    await asyncio.gather(
        *(engine.complete(prompt, params, lora=adapters[i % len(adapters)]) for i, prompt in enumerate(prompts))
    )
    return float(options.streams * options.tokens / (time.perf_counter() - start))


async def measure(options: argparse.Namespace, root: Path) -> None:
    folder = root / f"{Path(options.model).name}-{options.rank}"
    made = write_adapters(folder, options.model, options.rank, options.adapters)
    modules = {name: str(path) for name, path in made.items()}
    async with AsyncEngine(
        options.model,
        enable_lora=True,
        lora_modules=modules,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
        max_num_seqs=options.streams,
    ) as engine:
        ways: dict[str, list[str | None]] = {"base": [None], "adapters": [*modules]}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.turns + 1):
            for name, adapters in ways.items():
                speed = await tokens_per_s(engine, options, adapters)
                if turn:  # the first is a warm-up
                    found[name].append(speed)
                    print(f"{name:8} {speed:8.1f} tokens/s", flush=True)
    base, adapted = (statistics.median(speeds) for speeds in found.values())
    ratios = [a / b for b, a in zip(*found.values(), strict=True)]
    print(f"median   {adapted:8.1f} of {base:.1f} tokens/s: {adapted / base:.3f}", end="; ")
    print("by turn:", " ".join(f"{ratio:.3f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where adapters are kept for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, options.folder or Path(folder)))


if __name__ == "__main__":
    main()
