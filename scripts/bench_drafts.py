"""Tokens per second with drafts and without, in turns: on answers that repeat their prompt, and on new ones.

    repeats   the model is asked what it has just answered, with that answer in the conversation
    new       stories that it is asked for once

One engine drafts by prompt lookup, the other does not; rounds alternate which goes first. One JSON line for each kind
and number of streams: medians of tokens per second, and of the ratios of rounds.

    python scripts/bench_drafts.py --streams 1,8,32 --rounds 9
"""

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

from report import emit

from aserve import LLM, SamplingParams

CONCEPTS = ("paged attention", "a KV cache", "continuous batching", "a prefix cache", "preemption", "a block table")
HEROES = ("fox", "dog", "cat", "bird", "king", "star")
MAX_TOKENS = 96

Conversation = list[dict[str, str]]


def conversations(llm: LLM) -> dict[str, list[Conversation]]:
    """Of each kind as many as there are concepts."""
    questions: list[Conversation] = [[{"role": "user", "content": f"What is {concept}?"}] for concept in CONCEPTS]
    answers = answer(llm, questions)[1]
    repeats: list[Conversation] = [
        [*asked, {"role": "assistant", "content": text}, *asked] for asked, text in zip(questions, answers, strict=True)
    ]
    new: list[Conversation] = [[{"role": "user", "content": f"Tell me a story about a {hero}."}] for hero in HEROES]
    return {"repeats": repeats, "new": new}


def answer(llm: LLM, several: Sequence[Conversation]) -> tuple[float, list[str]]:
    """Tokens per second, and the texts."""
    start_s = time.perf_counter()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    completions = llm.chat(list(several), params, use_tqdm=False)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return num_tokens / (time.perf_counter() - start_s), [completion.text for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", default="1,8,32", help="numbers of requests at once")
    parser.add_argument("--kinds", default="repeats,new", help="of answers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--speculative-config", type=json.loads, default={"num_speculative_tokens": 8})
    arguments = parser.parse_args()
    speculative = arguments.speculative_config
    with LLM(arguments.model) as plain, LLM(arguments.model, speculative_config=speculative) as drafting:
        asked_by_kind = conversations(plain)
        for kind in arguments.kinds.split(","):
            several = asked_by_kind[kind]
            for num_streams in map(int, arguments.streams.split(",")):
                asked = (several * num_streams)[:num_streams]
                rates: dict[LLM, list[float]] = {plain: [], drafting: []}
                before = drafting.statistics()
                for turn in range(arguments.rounds):
                    texts = []
                    for llm in (plain, drafting) if turn % 2 else (drafting, plain):
                        rate, found = answer(llm, asked)
                        rates[llm].append(rate)
                        texts.append(found)
                    assert texts[0] == texts[1], "drafts change no answer"
                after = drafting.statistics()
                emit(
                    "drafts",
                    {"model": arguments.model, "kind": kind, "streams": num_streams, **speculative},
                    {
                        "tokens_per_s": median(rates[drafting]),
                        "plain_tokens_per_s": median(rates[plain]),
                        "ratio": median(a / b for a, b in zip(rates[drafting], rates[plain], strict=True)),
                        "drafts": after.num_drafts - before.num_drafts,
                        "accepted": sum(after.num_accepted_by_position) - sum(before.num_accepted_by_position),
                    },
                )


if __name__ == "__main__":
    main()
