"""How much memory the KV cache may take on CUDA: measured. On a CPU it is a share (host_budget.py).

On CUDA only our own allocator's counts are compared over time. Free memory of the whole device is read once, as a limit
and not as a difference, so that other tenants who come and go do not falsify the measurement.
"""

from typing import Final

import torch

from aserve.core.columns import NEUTRAL
from aserve.core.config import GiB
from aserve.core.ids import BlockId, Row, SeqId
from aserve.core.params import DEFAULT_MAX_LOGPROBS
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan
from aserve.core.speculation import MAX_STEP_DRAFTS
from aserve.kernels.ops import Ops
from aserve.models.interface import CausalLM
from aserve.models.sharding import ALONE, Shard
from aserve.runner.graph_device import graph_device
from aserve.runner.graph_keys import num_decode_graphs
from aserve.runner.kv_store import allocate_kv
from aserve.runner.mixed_graphs import MAX_MIXED_GRAPHS
from aserve.runner.runner import ModelRunner
from aserve.runner.warm_up import CONTROLS

MARGIN_BYTES: Final = GiB // 4
"""Left free for what torch's allocator does not count: kernels' code, cuBLAS workspaces, fragmentation."""
BYTES_PER_GRAPH: Final = 4 * 2**20
"""Of the nodes of a graph: some hundred kernels, and the driver's memory for each."""


def cuda_kv_budget(  # noqa: PLR0913  (what was loaded, and what was wished)
    model: CausalLM,
    ops: Ops,
    plan: StepPlan,
    *,
    cache_dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    gpu_memory_utilization: float,
    captured_len: int | None,
    shard: Shard = ALONE,
) -> int:
    """Bytes that the largest step leaves on the GPU. plan: that step; it is run once, on the null block alone.

    captured_len: the longest context of steps that become graphs, which keep memory of their own; None where
    none do. The largest graphs are captured too. shard: of the model; all ranks run the step together.
    """
    torch.cuda.reset_peak_memory_stats(device)
    allocated_bytes = torch.cuda.memory_allocated(device)
    kv = allocate_kv(model.spec, num_blocks=1, block_size=block_size, dtype=cache_dtype, device=device)
    graphs = None if captured_len is None else graph_device(device)
    runner = ModelRunner(
        model,
        ops,
        kv,
        max_num_seqs=len(plan.slices),
        max_model_len=captured_len or plan.slices[0].num_tokens,
        graph_device=graphs,
        shard=shard,
    )
    del kv  # it is the runner's, and goes with it
    graph_bytes = 0
    try:
        runner.run(plan)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        if graphs is not None and captured_len is not None:
            runner.capture_largest()
            graph_bytes = graph_budget(graphs.num_bytes, len(plan.slices), captured_len)
    finally:
        runner.close()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return kv_budget(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        peak_bytes=peak_bytes,
        step_bytes=peak_bytes - allocated_bytes,
        utilization=gpu_memory_utilization,
        graph_bytes=graph_bytes,
    )


def graph_budget(pool_bytes: int, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes that graphs of steps may come to, above what is measured: most are captured while serving.

    pool_bytes: of the pool that all share, after the largest, in which the others find room (`capture_order`). An
    eighth is added for what does not fit as it lies, and each graph has its nodes.
    """
    num_graphs = num_decode_graphs(max_num_seqs, max_model_len) + MAX_MIXED_GRAPHS
    return pool_bytes + pool_bytes // 8 + num_graphs * BYTES_PER_GRAPH


def kv_budget(
    *, total_bytes: int, free_bytes: int, peak_bytes: int, step_bytes: int, utilization: float, graph_bytes: int = 0
) -> int:
    """What is left: of our share after our peak, and of what is free now after the largest step and a margin.

    peak_bytes: weights and the largest step. step_bytes: that step alone. graph_bytes: to come. May be 0, never less.
    """
    ours = int(total_bytes * utilization) - peak_bytes
    return max(0, min(ours, free_bytes - step_bytes - MARGIN_BYTES) - graph_bytes)


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, num_drafts: int = 0
) -> StepPlan:
    """As many tokens as a step may have, in as many sequences, every one of them sampled with all that there is.

    max_model_len: no sequence is longer; a model may have no positions beyond it. The null block stands for every
    block, so that no more than it is needed. num_drafts: of a sequence at most, which are sampled at too.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(-(-max_num_batched_tokens // num_seqs), max_model_len)
    num_drafts = min(num_drafts, num_tokens - 1)
    num_drafting = -(-MAX_STEP_DRAFTS // num_drafts) if num_drafts else 0
    blocks = (BlockId(0),) * -(-num_tokens // block_size)
    sampling = RowSampling(
        NEUTRAL._replace(temperature=1.0, top_k=50, top_p=0.9),
        num_logprobs=DEFAULT_MAX_LOGPROBS,
        num_prompt_logprobs=DEFAULT_MAX_LOGPROBS,
        controls=CONTROLS,
    )
    return StepPlan(
        step_id=0,
        slices=tuple(
            SeqSlice(
                seq_id=SeqId(i),
                row=Row(i),
                start=0,
                num_tokens=num_tokens,
                token_ids=(0,) * num_tokens,
                num_samples=1 + num_drafts if i < num_drafting else 1,
                target_ids=(0,) * num_tokens,
            )
            for i in range(num_seqs)
        ),
        inits=tuple(RowInit(Row(i), SeqId(i), sampling, blocks) for i in range(num_seqs)),
    )
