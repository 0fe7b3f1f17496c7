"""Arrivals: requests of a recorded or a made-up workload, with the names of their prompts' blocks.

A block is 512 tokens, as in Mooncake's traces, whose ids name a block with all before it: equal ids, equal prompts up
to there. What a router sees is text, so a request's keys are made of its ids at the places where keys of a text end, at
four bytes a token (`aserve.routing.keys`).
"""

import csv
import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from random import Random

from aserve.routing.keys import ENDS, PromptKeys

BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4
_COPY = 10_000_000
"""Added to the ids of each copy of a trace."""
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Arrival:
    """block_ids: of the prompt's full blocks. session: of the conversation, as far as its ids tell."""

    at: float
    num_prompt: int
    num_output: int
    block_ids: tuple[int, ...]
    session: int

    def keys(self) -> PromptKeys:
        """As a router would make them of the prompt's text."""
        num_bytes = self.num_prompt * BYTES_PER_TOKEN
        ends = ENDS[: bisect_right(ENDS, num_bytes)]
        per_block = BLOCK_TOKENS * BYTES_PER_TOKEN
        hashes = []
        for place, end in enumerate(ends):
            block = (end - 1) // per_block
            name = self.block_ids[block] if block < len(self.block_ids) else -self.session - 1
            hashes.append((name * 1009 + place) * _MIX >> 20 & 0xFFFFFFFF)
        return PromptKeys(tuple(hashes), num_bytes)


def mooncake(path: Path) -> list[Arrival]:
    """A trace of Mooncake's (FAST'25): JSON lines with timestamp, input_length, output_length and hash_ids."""
    arrivals = []
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            ids = tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS])
            session = row["hash_ids"][1] if len(row["hash_ids"]) > 1 else -number
            arrivals.append(Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], ids, session))
    return arrivals


def azure(path: Path) -> list[Arrival]:
    """A trace of Azure's (AzurePublicDataset): CSV of times and lengths. Prompts have nothing in common."""
    arrivals: list[Arrival] = []
    ids = count(1)
    with gzip.open(path, "rt") as lines:
        rows = [(datetime.fromisoformat(row["TIMESTAMP"][:26]), row) for row in csv.DictReader(lines)]
    for number, (at, row) in enumerate(rows):
        num_prompt = int(row["ContextTokens"])
        own = tuple(next(ids) for _ in range(num_prompt // BLOCK_TOKENS))
        arrivals.append(
            Arrival((at - rows[0][0]).total_seconds(), num_prompt, int(row["GeneratedTokens"]), own, number)
        )
    return arrivals


def of_users(arrivals: Sequence[Arrival], share: float, seed: int = 0) -> list[Arrival]:
    """The workload of `share` times as many users, with the times between their turns as they are.

    Below 1 whole conversations are left out. Above, the trace is laid over itself, each copy with ids of its own but
    for the first block, which all conversations have, and turned in time by a part of its length.
    """
    if share < 1:
        random = Random(seed)
        kept = {session for session in sorted({a.session for a in arrivals}) if random.random() < share}
        return [arrival for arrival in arrivals if arrival.session in kept]
    num_copies, length_s = round(share), arrivals[-1].at
    copies: Iterator[Arrival] = (
        replace(
            arrival,
            at=(arrival.at + length_s * number / num_copies) % length_s,
            block_ids=arrival.block_ids[:1] + tuple(block + number * _COPY for block in arrival.block_ids[1:]),
            session=arrival.session + number * _COPY,
        )
        for number in range(num_copies)
        for arrival in arrivals
    )
    return sorted(copies, key=lambda arrival: arrival.at)


def with_hot_prefix(arrivals: Iterable[Arrival], share: float, num_blocks: int = 16, seed: int = 0) -> list[Arrival]:
    """A share of the requests begin with one and the same long prefix, in the place of as many of their own blocks."""
    random = Random(seed)
    hot = tuple(range(10**12, 10**12 + num_blocks))
    changed = []
    for arrival in arrivals:
        if random.random() < share:
            own = tuple(block + 2 * 10**12 for block in arrival.block_ids[num_blocks:])
            num_prompt = max(arrival.num_prompt, num_blocks * BLOCK_TOKENS + 64)
            changed.append(replace(arrival, block_ids=hot + own, num_prompt=num_prompt))
        else:
            changed.append(arrival)
    return changed


def conversations(num: int, num_turns: int, gap_s: float, seed: int = 0) -> list[Arrival]:
    """Made up: conversations that begin one after another and grow by two blocks a turn, after random pauses."""
    random, ids, arrivals = Random(seed), count(1), []
    for session in range(num):
        at, blocks = random.uniform(0, gap_s * num_turns), (0, *(next(ids) for _ in range(4)))
        for _ in range(num_turns):
            arrivals.append(Arrival(at, len(blocks) * BLOCK_TOKENS + 100, 50, blocks, session))
            at += random.expovariate(1 / gap_s)
            blocks += (next(ids), next(ids))
    return sorted(arrivals, key=lambda arrival: arrival.at)
