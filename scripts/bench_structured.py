"""Tokens per second of answers with a structure, and of free ones of the same length, on one engine in turns.

Schemas take turns over the streams (load/structures.py). One JSON line for each number of streams: medians of the
rounds, and of their ratios.

    python scripts/bench_structured.py --model MODEL --streams 1,32 --rounds 5
"""

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

from load.structures import SCHEMAS
from report import emit

from aserve import LLM, Completion, SamplingParams, StructuredOutputs

PROMPT = "Write a list of things, as JSON: "


def wanted(stream: int, max_tokens: int, *, is_structured: bool) -> SamplingParams:
    """Of one stream."""
    structured = StructuredOutputs(json=SCHEMAS[stream % len(SCHEMAS)]) if is_structured else None
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=stream, ignore_eos=True, structured=structured)


def answer(llm: LLM, several: Sequence[SamplingParams]) -> tuple[float, list[Completion]]:
    """Tokens per second, and the answers."""
    start_s = time.perf_counter()
    completions = llm.generate([PROMPT] * len(several), list(several), use_tqdm=False)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return num_tokens / (time.perf_counter() - start_s), completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", default="1,32", help="numbers of requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    arguments = parser.parse_args()
    with LLM(arguments.model, **arguments.options) as llm:
        for num_streams in map(int, arguments.streams.split(",")):
            kinds = {
                is_structured: [
                    wanted(stream, arguments.max_tokens, is_structured=is_structured) for stream in range(num_streams)
                ]
                for is_structured in (False, True)
            }
            for several in kinds.values():
                answer(llm, several)  # compiles the structures, and warms up
            rates: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(arguments.rounds):
                for is_structured in (False, True) if turn % 2 else (True, False):
                    rate, completions = answer(llm, kinds[is_structured])
                    assert all(len(completion.token_ids) == arguments.max_tokens for completion in completions)
                    rates[is_structured].append(rate)
            emit(
                "structured",
                {"model": arguments.model, "streams": num_streams, **arguments.options},
                {
                    "tokens_per_s": median(rates[True]),
                    "free_tokens_per_s": median(rates[False]),
                    "ratio": median(a / b for a, b in zip(rates[True], rates[False], strict=True)),
                },
            )


if __name__ == "__main__":
    main()
