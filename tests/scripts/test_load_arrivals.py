"""Traces are read, cut and made smaller, and keep their order and shared prefixes; Poisson arrivals are Poisson."""

import gzip
import json
import random
import statistics
from itertools import pairwise

import pytest

from aserve.load.arrivals import Arrival, draw_prompt, poisson, read_trace, scale, window
from aserve.load.prompts import Prompts

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:15:51.6805900,879,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 500, "hash_ids": [7, 8, 9]},
    {"timestamp": 3500, "input_length": 1536, "output_length": 20, "hash_ids": [7, 8, 10]},
]
PROMPTS = Prompts(range(300, 1000))


def test_azures_trace(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    trace = read_trace(tmp_path / "a.csv")
    assert [(one.num_in, one.num_out) for one in trace] == [(374, 44), (396, 109), (879, 55)]
    assert [one.at_s for one in trace] == pytest.approx([0, 4.25, 5])


def test_mooncakes_trace_gzipped(tmp_path):
    with gzip.open(tmp_path / "m.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    assert read_trace(tmp_path / "m.jsonl.gz") == [
        Arrival(0.0, 1100, 500, (7, 8, 9)),
        Arrival(2.5, 1536, 20, (7, 8, 10)),
    ]


def test_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a trace ends in \.csv or \.jsonl"):
        read_trace(tmp_path / "trace.parquet")


def test_a_window_counts_from_its_own_start():
    trace = [Arrival(float(second), second, 1) for second in range(10)]
    assert [(one.at_s, one.num_in) for one in window(trace, 4, 3)] == [(0, 4), (1, 5), (2, 6)]


def test_scaling_divides_times_and_multiplies_lengths():
    trace = [Arrival(0.0, 100, 50, (1,)), Arrival(8.0, 3000, 2, (1, 2)), Arrival(10.0, 1, 1)]
    small = scale(trace, speed=4, length=0.125, max_in=200, max_out=5)
    assert [(one.at_s, one.num_in, one.num_out) for one in small] == [(0, 12, 5), (2, 200, 1), (2.5, 1, 1)]
    assert [one.prefix_ids for one in small] == [(1,), (1, 2), ()]
    assert {one.block_tokens for one in small} == {64}


def test_prompts_share_exactly_the_blocks_that_the_trace_shares():
    first, second = (Arrival(0.0, 10, 1, ids, block_tokens=4) for ids in ((7, 8, 9), (7, 8, 10)))
    rng = random.Random(0)
    a, b = draw_prompt(first, PROMPTS, rng, salt=1), draw_prompt(second, PROMPTS, rng, salt=1)
    assert (len(a), len(b)) == (10, 10)
    assert a[:8] == b[:8]
    assert a[8:] != b[8:]
    assert draw_prompt(first, PROMPTS, rng, salt=2)[:8] != a[:8]


def test_what_no_block_covers_is_fresh():
    rng = random.Random(0)
    arrival = Arrival(0.0, 9, 1, (3,), block_tokens=4)
    a, b = draw_prompt(arrival, PROMPTS, rng, salt=0), draw_prompt(arrival, PROMPTS, rng, salt=0)
    assert (len(a), a[:4], a[4:] != b[4:]) == (9, b[:4], True)


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    arrivals = poisson([Arrival(0.0, 5, 6)] * 4000, 50.0, random.Random(1))
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert {(one.num_in, one.num_out) for one in arrivals} == {(5, 6)}
