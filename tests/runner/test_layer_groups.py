"""Layers in groups: one step's tensors to the digit, and real models whose freed blocks turn to NaN at once."""

from pathlib import Path

import pytest
import torch

from aserve.core.ids import RequestId
from aserve.core.layout import KVLayout, lay_out
from aserve.core.params import SamplingParams
from aserve.core.plan import StepPlan
from aserve.core.request import Request
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import Ops
from aserve.kernels.reference import ReferenceOps
from aserve.models.checkpoint import resolve_checkpoint
from aserve.models.loader import load_model
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import CpuDevice
from aserve.runner.kv_store import allocate_kv
from aserve.runner.rows import RowTable
from aserve.runner.runner import ModelRunner
from aserve.scheduler.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE, checkpoints
from tests.fakes import deltas_of
from tests.runner.toy import ToyLM, chunk, fed, init

__all__ = ["checkpoints"]
pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
BLOCK_SIZE = 8


def test_each_group_has_its_slots_and_its_table():
    rows = RowTable(num_rows=2, max_blocks_per_seq=8, device=CPU)
    controls = ControlTable(num_rows=2, vocab_size=97, torch_device=CPU, device=CpuDevice())
    builder = BatchBuilder(rows, controls, CpuDevice(), block_size=4, num_groups=2)
    builder.build(StepPlan(0, (chunk(1, 0, [1], 2, 3),), (init(1),)))
    plan = StepPlan(1, (chunk(0, 4, [5, 6, 7, 8, 9], 6, 7, 8, 9), fed(1, 1)), (init(0, 5, 0),))
    batch = builder.build(plan)
    assert batch is not None
    first, second = batch.attention.groups
    assert first.block_table_SM.tolist() == [[2, 0, 0], [5, 6, 8]]
    assert second.block_table_SM.tolist() == [[3, 0, 0], [0, 7, 9]]
    assert first.slots_T.tolist() == [9, 24, 25, 26, 27, 32]
    assert second.slots_T.tolist() == [13, 28, 29, 30, 31, 36]
    assert (first.slots_T.dtype, first.block_table_SM.dtype) == (torch.int64, torch.int32)
    assert first.block_table_SM.is_contiguous()
    assert batch.attention.slots_T is first.slots_T
    assert first.seq_lens_S.tolist() == second.seq_lens_S.tolist() == [2, 9]


def test_layers_of_a_place_share_planes():
    layout = KVLayout((None, 16), ((0, 0), (1, 0), (0, 1), (1, 1)))
    kv = allocate_kv(ToyLM.spec, num_blocks=3, block_size=4, dtype=torch.float32, device=CPU, layout=layout)
    assert kv.num_groups == 2
    assert kv.planes_YBX.shape == (4, 3, 4)
    assert [layer.group for layer in kv.layers] == [0, 1, 0, 1]
    assert kv.layers[0].k_BPKD.data_ptr() == kv.layers[1].k_BPKD.data_ptr() == kv.planes_YBX[0].data_ptr()
    assert kv.layers[2].v_BPKD.data_ptr() == kv.layers[3].v_BPKD.data_ptr() == kv.planes_YBX[3].data_ptr()


def generate_over_poison(folder: Path, ops: Ops, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """The answer to a prompt in chunks, where blocks that nobody holds are NaN. Returns the most blocks held, too."""
    model = load_model(resolve_checkpoint(str(folder)), device="cpu", ops=ops)
    layout = lay_out(model.spec.windows, 320)
    kv = allocate_kv(model.spec, num_blocks=120, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU, layout=layout)
    runner = ModelRunner(model, ops, kv, max_num_seqs=1, max_model_len=320)
    scheduler = Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=120,
        max_num_seqs=1,
        max_num_batched_tokens=20,
        max_model_len=320,
        enable_prefix_caching=False,
        windows=layout.windows,
    )
    scheduler.add(
        Request(
            id=RequestId("a"),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0.0),
            max_tokens=num_tokens,
            seed=0,
            arrival_s=0.0,
        )
    )
    answer, most = [], 0
    try:
        while (plan := scheduler.plan(0.0)) is not None:
            for delta in deltas_of(scheduler.commit(runner.run(plan))):
                answer += delta.token_ids
            most = max(most, scheduler.statistics().num_used_blocks)
            kv.planes_YBX[:, list(scheduler._cache._pool._free)] = torch.nan
    finally:
        runner.close()
    return answer, most


@pytest.mark.slow
@pytest.mark.parametrize("ops", [CpuOps(), ReferenceOps()], ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize(("recipe", "most_blocks"), [("mistral", 11), ("gemma2", 29 + 11), ("gemma3", 29 + 5 * 11)])
def test_what_is_in_freed_blocks_changes_nothing(checkpoints, recipe, most_blocks, ops):
    from transformers import AutoModelForCausalLM

    prompt = torch.randint(3, VOCAB_SIZE, (180,), generator=torch.Generator().manual_seed(3)).tolist()
    answer, most = generate_over_poison(checkpoints(recipe), ops, prompt, 50)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoints(recipe), attn_implementation="eager")
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False, pad_token_id=0
        )
    assert answer == whole[0, len(prompt) :].tolist()
    assert most <= most_blocks
