"""Tokens per second with drafts and without, in turns: on answers that repeat their prompt, and on new ones.

    repeats   the model is asked what it has just answered, with that answer in the conversation
    new       stories that it is asked for once

One engine answers with drafts and without, since of two in one process that are the same the second is some tenth
slower. So many requests at once as there are streams are a pair of answers, of which either comes first in turn. One
JSON line for each kind and number of streams: medians of tokens per second and of the ratios of pairs, with the error
of that median; `cpu_ratio` is that of processor time, which others on the machine change less.

    python scripts/bench_drafts.py --streams 1,8,32 --rounds 60
"""

import argparse
import json
import time
from collections.abc import Sequence as Several
from statistics import median

from report import emit, median_error

from aserve import LLM, SamplingParams
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.sequence import Sequence

CONCEPTS = ("paged attention", "a KV cache", "continuous batching", "a prefix cache", "preemption", "a block table")
HEROES = ("fox", "dog", "cat", "bird", "king", "star")
MAX_TOKENS = 96

Conversation = list[dict[str, str]]


class Switch:
    """Whether sequences that come have drafts. Those that have none take the way of an engine without a proposer."""

    is_on = True

    def __init__(self) -> None:
        adopt = Drafter.adopt

        def adopt_if_on(drafter: Drafter, sequence: Sequence) -> None:
            if self.is_on:
                adopt(drafter, sequence)

        Drafter.adopt = adopt_if_on  # type: ignore[method-assign, assignment]


def conversations(llm: LLM) -> dict[str, list[Conversation]]:
    """Of each kind as many as there are concepts."""
    questions: list[Conversation] = [[{"role": "user", "content": f"What is {concept}?"}] for concept in CONCEPTS]
    answers = answer(llm, questions)[2]
    repeats: list[Conversation] = [
        [*asked, {"role": "assistant", "content": text}, *asked] for asked, text in zip(questions, answers, strict=True)
    ]
    new: list[Conversation] = [[{"role": "user", "content": f"Tell me a story about a {hero}."}] for hero in HEROES]
    return {"repeats": repeats, "new": new}


def answer(llm: LLM, several: Several[Conversation]) -> tuple[float, float, list[str]]:
    """Tokens per second, per second of processor time, and the texts."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    completions = llm.chat(list(several), params, use_tqdm=False)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    rate, cpu_rate = num_tokens / (time.perf_counter() - start_s), num_tokens / (time.process_time() - start_cpu_s)
    return rate, cpu_rate, [completion.text for completion in completions]


def ratios(rates: dict[bool, list[float]]) -> list[float]:
    """Of answers with drafts to those without, pair by pair."""
    return [a / b for a, b in zip(rates[True], rates[False], strict=True)]


def groups_of(several: Several[Conversation], num_streams: int) -> list[list[Conversation]]:
    """All of them, so many at once; where these are more than there are, each more than once."""
    asked = [*several] * -(-num_streams // len(several))
    return [asked[first : first + num_streams] for first in range(0, len(asked) - num_streams + 1, num_streams)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", default="1,8,32", help="numbers of requests at once")
    parser.add_argument("--kinds", default="repeats,new", help="of answers")
    parser.add_argument("--rounds", type=int, default=60, help="over all conversations")
    parser.add_argument("--speculative-config", type=json.loads, default={"num_speculative_tokens": 8})
    arguments = parser.parse_args()
    speculative = arguments.speculative_config
    switch = Switch()
    with LLM(arguments.model, speculative_config=speculative) as llm:
        asked_by_kind = conversations(llm)
        for kind in arguments.kinds.split(","):
            several = asked_by_kind[kind]
            for num_streams in map(int, arguments.streams.split(",")):
                groups = groups_of(several, num_streams)
                rates: dict[bool, list[float]] = {True: [], False: []}
                cpu_rates: dict[bool, list[float]] = {True: [], False: []}
                before = llm.statistics()
                for turn, asked in enumerate(groups * arguments.rounds):
                    texts = []
                    is_second = (turn + turn // len(groups)) % 2 == 1
                    for switch.is_on in (is_second, not is_second):
                        rate, cpu_rate, found = answer(llm, asked)
                        rates[switch.is_on].append(rate)
                        cpu_rates[switch.is_on].append(cpu_rate)
                        texts.append(found)
                    assert texts[0] == texts[1], "drafts change no answer"
                after = llm.statistics()
                emit(
                    "drafts",
                    {"model": arguments.model, "kind": kind, "streams": num_streams, **speculative},
                    {
                        "tokens_per_s": median(rates[True]),
                        "plain_tokens_per_s": median(rates[False]),
                        "ratio": median(ratios(rates)),
                        "ratio_error": median_error(ratios(rates)),
                        "cpu_ratio": median(ratios(cpu_rates)),
                        "drafts": after.num_drafts - before.num_drafts,
                        "accepted": sum(after.num_accepted_by_position) - sum(before.num_accepted_by_position),
                    },
                )


if __name__ == "__main__":
    main()
