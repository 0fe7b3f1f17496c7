"""A small step takes one thread, a large one all, and whoever comes after finds the number that was there."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from aserve.kernels.cpu import CpuOps
from aserve.runner.threads import WORTH_S, StepThreads, measure_flops_per_thread, way_giver
from tests.kernels.cases import native_ops
from tests.runner.toy import ToyLM

pytestmark = pytest.mark.torch

SPEC = msgspec.structs.replace(ToyLM.spec, num_layers=2, hidden_size=1000, intermediate_size=2000, vocab_size=6000)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_two_operations_a_weight():
    assert SPEC.flops_per_token == 2 * (2 * (4 * 1000 + 3 * 1000 * 2000) + 6000 * 1000)


@pytest.mark.usefixtures("three_threads")
def test_threads_grow_with_the_step_up_to_those_that_there_are():
    threads = StepThreads(SPEC, 100 * SPEC.flops_per_token)
    seen = []
    for share in (0, 0.5, 1.5, 2.5, 3.5, 100):
        with threads.of(int(100 * share)):
            seen.append(torch.get_num_threads())
        assert torch.get_num_threads() == 3
    assert seen == [1, 1, 1, 2, 3, 3]


@pytest.mark.usefixtures("three_threads")
def test_a_step_that_fails_leaves_the_number_as_it_was():
    threads = StepThreads(SPEC, 1)
    with pytest.raises(ZeroDivisionError), threads.of(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_of_a_step_that_has_several_give_way():
    """The fault: threads that look for work held the processors, and the event loop waited for up to 4 ms."""
    asked: list[int] = []
    threads = StepThreads(SPEC, 100 * SPEC.flops_per_token, give_way=asked.append)
    for num_tokens in (50, 250, 1000):
        with threads.of(num_tokens):
            pass
        threads.give_way()
    assert asked == [2, 3]
    StepThreads(SPEC, 1).give_way()
    give_way = way_giver(native_ops())
    assert give_way is not None
    give_way(2)
    assert way_giver(CpuOps()) is None


@pytest.mark.usefixtures("three_threads")
def test_what_a_thread_is_worth_is_measured_on_one():
    flops = measure_flops_per_thread()
    assert 1e9 < flops / WORTH_S < 1e13, "between a slow phone's core and ten times the fastest one's"
    assert torch.get_num_threads() == 3


LOADED = """
import asyncio, os, sys, threading
from pathlib import Path
import numpy, torch
from aserve import AsyncEngine, SamplingParams
from aserve.model_folder import DEMO_FOLDER
from tests.adapters import write_adapter

def count():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

async def main(folder, before):
    options = {"device": "cpu", "enable_lora": True, "max_lora_rank": 256, "lora_root": str(folder.parent)}
    async with AsyncEngine("demo", **options) as engine:
        await engine.adapters.add("adapter", str(folder))
        params = SamplingParams(max_tokens=8)
        async with engine.open("Once upon a time " * 60, params, lora="adapter") as mailbox:
            async for _ in mailbox:
                pass
        print(count() - before)

before = count()
[root] = sys.argv[1:]
writing = threading.Thread(target=write_adapter, args=(Path(root) / "adapter", DEMO_FOLDER), kwargs={"rank": 256})
writing.start()
writing.join()
asyncio.run(main(Path(root) / "adapter", before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_no_thread_but_the_runners_has_threads_of_its_own_for_products(tmp_path):
    """With tables of the default sizes, and an adapter that is read later: whoever fills or moves tensors of more than
    32,768 numbers makes threads. OpenMP lets those that wait spin only while all that there are fit the processors."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert int(ran.stdout) <= 1
