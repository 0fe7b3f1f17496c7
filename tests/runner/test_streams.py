"""What only a GPU can get wrong: streams, pinned buffers, waiting and memory. Where it makes sense, on the CPU too."""

import asyncio
from collections import deque

import numpy as np
import pytest
import torch

from aserve.core.plan import StepPlan
from aserve.kernels.dispatch import select_ops
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.models.layers import DenseMethod
from aserve.models.qwen3 import qwen3
from aserve.models.rope import rope_table
from aserve.models.spec import read_spec
from aserve.models.weights import RandomWeights
from aserve.runner.device import step_device
from aserve.runner.flight import StepFlight
from aserve.runner.graph_device import graph_device
from aserve.runner.kv_store import allocate_kv
from aserve.runner.profile import cuda_kv_budget, largest_step
from aserve.runner.runner import ModelRunner
from aserve.runner.warm_up import FILTERED
from tests.checkpoints import SHAPE
from tests.runner.toy import chunk, fed, init

pytestmark = pytest.mark.torch
needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
BLOCK_SIZE = 8
NUM_STEPS = 40
MAX_MODEL_LEN = 128
WORKSPACE_BYTES = 2**27
"""torch keeps one for cuBLAS on each stream that ever multiplied, and gives none back."""


def model_on(device: torch.device, ops: Ops, seed: int = 0) -> CausalLM:
    """Qwen3, tiny and random."""
    spec = read_spec({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "head_dim": 16})
    assert spec.rope is not None
    weights = RandomWeights(torch.float32, device, seed)
    return qwen3(spec, ops, weights, DenseMethod(), rope_table(spec.rope, spec.head_dim, MAX_MODEL_LEN, device))


def runner_on(name: str, seed: int = 0, *, graphs: bool = False) -> ModelRunner:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    ops = select_ops(device)
    model = model_on(device, ops, seed)
    kv = allocate_kv(model.spec, num_blocks=64, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
    capturing = graph_device(device) if graphs else None
    return ModelRunner(model, ops, kv, max_num_seqs=4, max_model_len=MAX_MODEL_LEN, graph_device=capturing)


def plans() -> list[StepPlan]:
    """Two prompts, one of them sampled with filters, then NUM_STEPS tokens of each, all fed on the device."""
    blocks = [range(1, 17), range(17, 33)]
    prompts = StepPlan(
        0,
        (chunk(0, 0, range(20)), chunk(1, 0, range(9))),
        (init(0, *blocks[0]), init(1, *blocks[1], sampling=FILTERED)),
    )
    return [prompts, *(StepPlan(1 + i, (fed(0, 20 + i), fed(1, 9 + i))) for i in range(NUM_STEPS))]


async def tokens_of(*runners: ModelRunner) -> list[list[tuple[int, ...]]]:
    """What each runner samples in `plans`, step by step, all of them with two steps in flight at once."""

    async def run(runner: ModelRunner) -> list[tuple[int, ...]]:
        flying: deque[StepFlight] = deque()
        found = []
        for plan in plans():
            flying.append(runner.launch(plan))
            if len(flying) == 2:
                found.append((await flying.popleft().land()).token_ids)
        return [*found, (await flying.popleft().land()).token_ids]

    return list(await asyncio.gather(*map(run, runners)))


@pytest.mark.parametrize("device", DEVICES)
async def test_two_runners_beside_each_other_say_what_each_says_alone(device):
    alone = []
    for seed in (0, 1):
        runner = runner_on(device, seed)
        alone += await tokens_of(runner)
        runner.close()
    runners = [runner_on(device, seed) for seed in (0, 1)]
    together = await tokens_of(*runners)
    for runner in runners:
        runner.close()
    assert together == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("device", DEVICES)
def test_uploads_keep_their_values_while_the_device_is_behind(device):
    step = step_device(torch.device(device, 0) if device == "cuda" else torch.device(device))
    with torch.inference_mode(), step.stepping():
        if device == "cuda":
            torch.cuda._sleep(200_000_000)  # a tenth of a second, in which no copy starts
        uploads = [step.upload([np.full(3000, i), np.full(7, i, np.float32)]) for i in range(100)]
        waits = [step.download([torch.stack([ids[0], ids[-1], floats[0].long()])]) for ids, floats in uploads]
    assert [wait() for wait in waits] == [[[i] * 3] for i in range(100)]
    step.drain()
    step.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_launching_a_step_does_not_wait_for_the_device():
    runner = runner_on("cuda")
    runner.warm_up()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for plan in plans():
            assert len(runner.run(plan).token_ids) == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_largest_step_is_measured_and_closing_gives_all_memory_back():
    runner = runner_on("cuda")
    runner.warm_up()
    runner.close()
    device = torch.device("cuda", 0)
    counters = (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
    before = [count(device) for count in counters]
    ops = select_ops(device)
    model = model_on(device, ops)
    budget = cuda_kv_budget(
        model,
        ops,
        largest_step(4, 512, MAX_MODEL_LEN, BLOCK_SIZE),
        cache_dtype=torch.float32,
        device=device,
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=0.5,
        captured_len=MAX_MODEL_LEN,
    )
    assert 2**30 < budget < torch.cuda.get_device_properties(device).total_memory / 2
    kv = allocate_kv(model.spec, num_blocks=2**18, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
    kv_bytes = kv.planes_YBX.nbytes
    runner = ModelRunner(model, ops, kv, max_num_seqs=4, max_model_len=MAX_MODEL_LEN)
    del model, kv
    runner.warm_up()
    assert torch.cuda.memory_allocated(device) > before[0] + kv_bytes
    runner.close()
    for count, count_before in zip(counters, before, strict=True):
        assert count(device) <= count_before + WORKSPACE_BYTES
