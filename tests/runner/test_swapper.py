"""BlockOps in the runner: what a sequence reads through copied, swapped and recycled blocks is what was written."""

import pytest
import torch

from aserve.core.errors import ConfigError
from aserve.core.plan import BlockOps, StepPlan
from aserve.kernels.cpu import CpuOps
from aserve.runner import swapper
from aserve.runner.device import CudaDevice, step_device
from aserve.runner.kv_store import allocate_kv
from aserve.runner.swapper import BlockMover, CudaHostStore
from tests.runner.fake_cuda import FakeCuda
from tests.runner.toy import ToyLM, chunk, continuation, fed, init, toy_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def runner():
    runner = toy_runner(num_host_blocks=4)
    yield runner
    runner.close()


def test_a_copied_block_lets_two_sequences_go_on_from_one_prefix(runner):
    """Blocks 1 and 2 hold the prompt; 2 is not full, so whoever writes to it needs a copy."""
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    ops = BlockOps(copies=((2, 3),))
    fork = StepPlan(1, (fed(0, 6), chunk(1, 6, [42])), (init(1, 1, 3),), ops)
    tokens = runner.run(fork).token_ids
    first = continuation(PROMPT, 2)
    assert list(tokens) == [first[1], *continuation([*PROMPT, 42], 1)]
    after = runner.run(StepPlan(2, (fed(0, 7), fed(1, 7)))).token_ids
    assert list(after) == [continuation(PROMPT, 3)[2], continuation([*PROMPT, 42], 2)[1]]


def test_a_swapped_sequence_reads_what_it_wrote_though_its_blocks_were_used_by_another(runner):
    [first] = runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),))).token_ids
    out = BlockOps(swap_outs=((1, 3), (2, 0)))
    stranger = StepPlan(1, (chunk(1, 0, [11] * 8, 2, 1),), (init(1),), out)
    assert list(runner.run(stranger).token_ids) == continuation([11] * 8, 1)
    back = BlockOps(swap_ins=((3, 7), (0, 5)))
    again = StepPlan(2, (chunk(0, 6, [first]), fed(1, 8, 4)), (init(0, 7, 5),), back)
    assert list(runner.run(again).token_ids) == [continuation(PROMPT, 2)[1], continuation([11] * 8, 2)[1]]


def test_kinds_happen_in_order(runner):
    """Out to the host, a copy over the block that went out, and the host's block back into the copy's source."""
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2), chunk(1, 0, [3, 4, 5], 3)), (init(0), init(1))))
    ops = BlockOps(swap_outs=((2, 0),), copies=((3, 2),), swap_ins=((0, 3),))
    swapped = StepPlan(1, (chunk(0, 5, PROMPT[5:]), chunk(1, 2, [5])), (init(0, 1, 3), init(1, 2)), ops)
    assert list(runner.run(swapped).token_ids) == [*continuation(PROMPT, 1), *continuation([3, 4, 5], 1)]


async def test_a_plan_of_moves_alone_lands_empty(runner):
    runner.run(StepPlan(0, (chunk(0, 0, PROMPT, 1, 2),), (init(0),)))
    result = await runner.launch(StepPlan(1, (), (), BlockOps(swap_outs=((1, 1), (2, 2))))).land()
    assert (result.step_id, result.token_ids) == (1, ())
    runner.run(StepPlan(2, (), (init(0, 5, 6),), BlockOps(swap_ins=((1, 5), (2, 6)))))
    assert list(runner.run(StepPlan(3, (chunk(0, 5, PROMPT[5:]),))).token_ids) == continuation(PROMPT, 1)


def test_without_host_memory_a_swap_is_our_bug():
    runner = toy_runner()
    with pytest.raises(AssertionError, match="no host memory"):
        runner.run(StepPlan(0, (), (), BlockOps(swap_outs=((1, 0),))))
    runner.close()


def host_store(gpu: FakeCuda, num_host_blocks: int) -> tuple[CudaHostStore, CudaDevice, torch.Tensor]:
    """What CUDA takes, on a model of it, beside 41 blocks of numbers."""
    cpu = torch.device("cpu")
    kv = allocate_kv(ToyLM.spec, num_blocks=41, block_size=4, dtype=torch.float32, device=cpu)
    kv.planes_YBX.copy_(torch.arange(kv.planes_YBX.numel()).view(kv.planes_YBX.shape))
    device = CudaDevice(cpu, gpu)
    return CudaHostStore(CpuOps(), kv, device, num_host_blocks, gpu), device, kv.planes_YBX


def test_blocks_go_out_and_come_back_while_streams_run_in_any_order(monkeypatch):
    """Their places are overwritten by the next work of the step, and staging buffers are used again and again."""
    monkeypatch.setattr(swapper, "STAGING_BYTES", 3 * 2 * 4 * 4)  # three blocks of two planes
    gpu = FakeCuda()
    pool, device, planes_YBX = host_store(gpu, 20)
    before = planes_YBX.clone()
    with torch.inference_mode(), device.stepping():
        for round_ in range(5):
            pool.swap_out([(block, block - 1) for block in range(1, 21)])
            planes_YBX.zero_()
            for _ in range(7 * round_):
                gpu.advance(pool._stream)
            pool.swap_in([(block - 1, block + 20) for block in range(1, 21)])
            planes_YBX[:, 1:21].copy_(planes_YBX[:, 21:41])
    device.drain()
    pool.close()
    assert torch.equal(planes_YBX[:, 21:41], before[:, 1:21])


def test_swap_space_takes_what_was_asked_for_and_gives_it_back():
    """torch's allocator of pinned memory would round it up to a power of two, and keep it."""
    gpu = FakeCuda()
    pool, device, planes_YBX = host_store(gpu, 40)
    num_bytes = 40 * planes_YBX[:, 0].nbytes
    assert list(gpu.locked.values()) == [num_bytes]
    pool.close()
    pool.close()
    assert gpu.locked == {}
    device.drain()

    pinned = gpu.pinned((num_bytes,), torch.uint8)
    del pinned
    gpu.device.empty_cache()
    assert gpu.host.reserved_bytes > 1.5 * num_bytes
    gpu.release_cached()
    assert gpu.host.reserved_bytes == 0


def test_pages_that_the_system_does_not_lock_are_one_clear_error():
    with pytest.raises(
        ConfigError, match=r"^swap_space: 0.00 GiB of host memory cannot be page-locked .*out of memory"
    ):
        host_store(FakeCuda(lockable_bytes=1000), 40)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_blocks_go_out_and_come_back_in_more_groups_than_there_are_buffers(monkeypatch):
    """While their places are overwritten by the next kernels, as a step would."""
    from aserve.kernels.triton_ops import TritonOps

    cuda = torch.device("cuda", torch.cuda.current_device())
    kv = allocate_kv(ToyLM.spec, num_blocks=41, block_size=4, dtype=torch.float32, device=cuda)
    monkeypatch.setattr(swapper, "STAGING_BYTES", 3 * 2 * 4 * 4)  # three blocks of two planes
    device = step_device(cuda)
    mover = BlockMover(TritonOps(num_sms=8), kv, device, num_host_blocks=20)
    kv.planes_YBX.normal_()
    before = kv.planes_YBX.clone()
    torch.cuda.synchronize()
    there, back = [(block, block - 1) for block in range(1, 21)], [(block - 1, block + 20) for block in range(1, 21)]
    for _ in range(5):
        with torch.inference_mode(), device.stepping():
            mover.move(BlockOps(swap_outs=tuple(there)))
            kv.planes_YBX.zero_()
            mover.move(BlockOps(swap_ins=tuple(back)))
            kv.planes_YBX[:, 1:21].copy_(kv.planes_YBX[:, 21:41])
    device.drain()
    mover.close()
    assert torch.equal(kv.planes_YBX[:, 21:41], before[:, 1:21])
    device.release()
