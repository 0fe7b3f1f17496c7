"""When requests come and how long they are: Poisson arrivals, and recorded traces replayed smaller.

Two formats are read: Azure's LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's
(JSON lines: timestamp in ms, input_length, output_length, hash_ids), plain or gzipped.
"""

import csv
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from aserve.load.prompts import Prompts

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens of the prompt that one of Mooncake's hash_ids stands for."""


class Arrival(NamedTuple):
    """One request to come: seconds after the start, tokens in and out, and what its prompt shares with others.

    prefix_ids: equal numbers at the beginning of two lists stand for equal blocks of `block_tokens` tokens.
    """

    at_s: float
    num_in: int
    num_out: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS


def poisson(requests: Sequence[Arrival], rate: float, rng: random.Random) -> list[Arrival]:
    """The same requests, `rate` a second on average, independent of one another."""
    now_s, arrivals = 0.0, []
    for one in requests:
        now_s += rng.expovariate(rate)
        arrivals.append(one._replace(at_s=now_s))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """A recorded trace in order of time, from second 0 on. Raises ValueError for a name of neither format."""
    name = path.name.removesuffix(".gz")
    reader = {"csv": _read_azure, "jsonl": _read_mooncake}.get(name.rpartition(".")[2])
    if reader is None:
        raise ValueError(f"{path}: a trace ends in .csv or .jsonl, or these with .gz")
    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as lines:
        arrivals = sorted(reader(lines))
    return [one._replace(at_s=one.at_s - arrivals[0].at_s) for one in arrivals]


def window(arrivals: Sequence[Arrival], start_s: float, seconds: float) -> list[Arrival]:
    """Those of [start_s, start_s + seconds), counted from its start."""
    chosen = (one for one in arrivals if start_s <= one.at_s < start_s + seconds)
    return [one._replace(at_s=one.at_s - start_s) for one in chosen]


def scale(arrivals: Sequence[Arrival], *, speed: float, length: float, max_in: int, max_out: int) -> list[Arrival]:
    """The same order and the same sharing of prefixes, `speed` times as fast and `length` times as long.

    max_in, max_out: what is longer than that after scaling is cut to it.
    """
    return [
        Arrival(
            at_s=one.at_s / speed,
            num_in=min(max_in, max(1, round(one.num_in * length))),
            num_out=min(max_out, max(1, round(one.num_out * length))),
            prefix_ids=one.prefix_ids,
            block_tokens=max(1, round(one.block_tokens * length)),
        )
        for one in arrivals
    ]


def draw_prompt(arrival: Arrival, prompts: Prompts, rng: random.Random, salt: int) -> list[int]:
    """Token ids of its length. Equal prefix_ids give equal blocks wherever the salt is the same."""
    ids: list[int] = []
    for block in arrival.prefix_ids:
        ids += prompts.draw(random.Random(f"{salt}/{block}"), arrival.block_tokens)
        if len(ids) >= arrival.num_in:
            break
    return ids[: arrival.num_in] + prompts.draw(rng, max(0, arrival.num_in - len(ids)))


def _read_azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of the second are one more than it reads
        yield Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _read_mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in map(json.loads, lines):
        yield Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
