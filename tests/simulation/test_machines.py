"""Simulations of a made-up machine's recording, against what that machine does with the same traffic.

pytest -s -m thorough tests/simulation      prints how far off they are, by figure, in %: least, median and most
"""

from statistics import median

import pytest

from aserve.simulation.changes import changed
from aserve.simulation.meter import Figures
from aserve.simulation.simulator import Simulator
from tests.simulation.machines import Machine, RecordedRun, random_traffic
from tests.simulation.worlds import config_of

CONFIG = config_of(block_size=16, num_blocks=2000, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512)
FIGURES = (
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "latency_p50_s",
    "latency_p99_s",
)
CHANGES = {
    "nothing": {},
    "max_num_seqs": {"max_num_seqs": 8},
    "max_num_batched_tokens": {"max_num_batched_tokens": 128},
    "long_prefill_token_threshold": {"long_prefill_token_threshold": 64},
}


def off(found: Figures, real: Figures) -> list[float]:
    return [100 * (getattr(found, name) / getattr(real, name) - 1) for name in FIGURES]


def compared(num: int, rate: float, seed: int, names: list[str]) -> dict[str, list[float]]:
    """By change, how far off each figure is."""
    traffic, rows, seconds = random_traffic(num, rate, seed, CONFIG), {}, 2 * num / rate + 60
    first, recording = RecordedRun(traffic, CONFIG, Machine(seconds, seed=seed, jitter=1)).recorded(traffic)
    for name in names:
        config = changed(CONFIG, CHANGES[name])
        real = first
        if name != "nothing":
            real, _ = RecordedRun(traffic, config, Machine(seconds, seed=seed, jitter=2)).recorded(traffic)
        rows[name] = off(Simulator(recording, config).run(), real)
    return rows


@pytest.mark.slow
def test_a_recording_is_simulated_as_it_was_and_changes_as_they_turn_out():
    rows = compared(60, 6.0, 0, ["nothing", "max_num_seqs"])
    assert max(map(abs, rows["nothing"])) < 5
    assert median(map(abs, rows["max_num_seqs"])) < 5
    assert max(map(abs, rows["max_num_seqs"])) < 25


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num", "rate"), [(140, 2.0), (300, 5.0)])
def test_figures_are_within_15_percent(num, rate):
    """As medians of three recordings, whose 99th percentiles of first tokens are of two or three requests."""
    found = [compared(num, rate, seed, list(CHANGES)) for seed in range(3)]
    for name in CHANGES:
        columns = list(zip(*(rows[name] for rows in found), strict=True))
        for figure, column in zip(FIGURES, columns, strict=True):
            print(f"{rate} a second, {name}, {figure}: {min(column):+.1f} {median(column):+.1f} {max(column):+.1f}")
        assert all(abs(median(column)) < 15 for column in columns), name
