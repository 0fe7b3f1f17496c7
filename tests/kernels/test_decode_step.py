"""A captured decoding step through the Triton kernels: padding rows without context leave the others as they are."""

from collections.abc import Callable

import pytest
import torch

from aserve.core.plan import RowSampling, StepPlan
from aserve.models.layers import DenseMethod
from aserve.models.qwen3 import qwen3
from aserve.models.rope import rope_table
from aserve.models.spec import read_spec
from aserve.models.weights import RandomWeights
from aserve.runner.graph_device import GraphDevice, graph_device
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner
from tests.checkpoints import SHAPE
from tests.kernels.cases import Fast
from tests.runner.toy import chunk, fed, init

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FILTERED = RowSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.0, seed=3)
NUM_STEPS = 6


class Repeated:
    """A `GraphDevice` that does the work again: the interpreter has no launches to record."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def tokens(fast: Fast, graphs: GraphDevice | None) -> list[tuple[int, ...]]:
    """Of three rows, two of them greedy, in a bucket of four."""
    spec = read_spec({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "head_dim": 16, "num_hidden_layers": 1})
    assert spec.rope is not None
    weights = RandomWeights(torch.float32, fast.device, 0)
    model = qwen3(spec, fast.ops, weights, DenseMethod(), rope_table(spec.rope, 16, 64, fast.device))
    kv = allocate_kv(spec, num_blocks=8, block_size=8, dtype=torch.float32, device=fast.device)
    kv.planes_YBX[:, 0] = torch.nan  # the null block: what padding writes and nobody reads
    runner = ModelRunner(model, fast.ops, kv, max_num_seqs=4, max_model_len=64, graph_device=graphs)
    prompts = ([1, 2, 3], [4, 5, 6, 7, 8], [9])
    chunks = tuple(chunk(row, 0, prompt, 1 + 2 * row, 2 + 2 * row) for row, prompt in enumerate(prompts))
    inits = (init(0), init(1, sampling=FILTERED), init(2))
    results = [runner.run(StepPlan(0, chunks, inits)).token_ids]
    for k in range(NUM_STEPS):
        rows = tuple(fed(row, len(prompt) + k) for row, prompt in enumerate(prompts))
        results.append(runner.run(StepPlan(1 + k, rows)).token_ids)
    runner.close()
    return results


def test_a_padded_step_says_what_an_eager_one_does(triton_each: Fast) -> None:
    if triton_each.dtype != torch.float32:
        pytest.skip("weights are float32")
    assert tokens(triton_each, graph_device(triton_each.device) or Repeated()) == tokens(triton_each, None)
