"""Captured steps through the Triton kernels: padding, of rows without context or on the null block, is not seen."""

from collections.abc import Callable

import pytest
import torch

from aserve.core import columns
from aserve.core.plan import RowSampling, StepPlan
from aserve.models.layers import DenseMethod
from aserve.models.qwen3 import qwen3
from aserve.models.rope import rope_table
from aserve.models.spec import read_spec
from aserve.models.weights import RandomWeights
from aserve.runner import mixed_graphs
from aserve.runner.graph_device import GraphDevice, graph_device
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner
from tests.checkpoints import SHAPE
from tests.kernels.cases import Fast
from tests.runner.toy import chunk, fed, init

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FILTERED = RowSampling(columns.NEUTRAL._replace(temperature=0.8, top_k=20, top_p=0.9, seed=3))
NUM_STEPS = 6


class Repeated:
    """A `GraphDevice` that does the work again: the interpreter has no launches to record."""

    num_bytes = 0

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        return work


def runner_of(fast: Fast, graphs: GraphDevice | None) -> ModelRunner:
    """A layer of Qwen3 and four rows. The null block, which padding writes and nobody reads, holds NaN."""
    spec = read_spec({"architectures": ["Qwen3ForCausalLM"], **SHAPE, "head_dim": 16, "num_hidden_layers": 1})
    assert spec.rope is not None
    weights = RandomWeights(torch.float32, fast.device, 0)
    model = qwen3(spec, fast.ops, weights, DenseMethod(), rope_table(spec.rope, 16, 64, fast.device))
    kv = allocate_kv(spec, num_blocks=10, block_size=8, dtype=torch.float32, device=fast.device)
    kv.planes_YBX[:, 0] = torch.nan
    return ModelRunner(model, fast.ops, kv, max_num_seqs=4, max_model_len=64, graph_device=graphs)


def tokens(fast: Fast, graphs: GraphDevice | None) -> list[tuple[int, ...]]:
    """Of three rows, two of them greedy, in a bucket of four."""
    runner = runner_of(fast, graphs)
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


def mixed_tokens(fast: Fast, graphs: GraphDevice | None) -> list[tuple[int, ...]]:
    """Two prompts; then one of them decodes beside a chunk and a prompt of one token; then all but one do."""
    runner = runner_of(fast, graphs)
    plans = (
        StepPlan(0, (chunk(0, 0, [1, 2, 3], 1, 2), chunk(1, 0, [4] * 11, 3, 4)), (init(0), init(1, sampling=FILTERED))),
        StepPlan(
            1,
            (chunk(2, 0, [5] * 9, 5, 6, num_samples=0), fed(1, 11), chunk(3, 0, [8], 7)),
            (init(2), init(3, sampling=FILTERED)),
        ),
        StepPlan(2, (fed(0, 3), fed(1, 12), chunk(2, 9, [6, 7]), fed(3, 1))),
    )
    results = [runner.run(plan).token_ids for plan in plans]
    runner.close()
    return results


def test_a_step_with_prompts_that_is_padded_says_what_an_eager_one_does(
    triton_each: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton_each.dtype != torch.float32:
        pytest.skip("weights are float32")
    monkeypatch.setattr(mixed_graphs, "CAPTURE_AFTER", 0)
    monkeypatch.setattr(mixed_graphs, "TOKEN_BUCKETS", (32,))  # the interpreter takes its time for each
    graphs = graph_device(triton_each.device) or Repeated()
    assert mixed_tokens(triton_each, graphs) == mixed_tokens(triton_each, None)
    assert not isinstance(graphs, Repeated) or graphs.num_captures == 2
