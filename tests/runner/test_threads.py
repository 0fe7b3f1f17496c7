"""A small step takes one thread, a large one all, and whoever comes after finds the number that was there."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from aserve.runner.threads import WORTH_S, StepThreads, measure_flops_per_thread
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
def test_what_a_thread_is_worth_is_measured_on_one():
    flops = measure_flops_per_thread()
    assert 1e9 < flops / WORTH_S < 1e13, "between a slow phone's core and ten times the fastest one's"
    assert torch.get_num_threads() == 3


LOADED = """
import os, threading
import numpy, torch
from aserve import LLM

def count():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

before = count()
with LLM("demo", device="cpu", max_model_len=512) as llm:
    llm.generate("Once upon a time " * 60, use_tqdm=False)
    print(count() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_no_thread_but_the_runners_has_threads_of_its_own_for_products():
    """OpenMP lets them spin until the next product only while all that there are fit the processors."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, env=environment)
    assert int(ran.stdout) <= 1
