"""What the machine and the model leave to serve with: facts that `core.config.resolve` decides by.

On CUDA the largest step is run, since what it takes cannot be told otherwise.
"""

from typing import TYPE_CHECKING

from aserve.core.config import Facts, Options
from aserve.core.defaults import default_max_num_batched_tokens, default_max_num_seqs
from aserve.core.layout import KVLayout, stretched
from aserve.models.sharding import ALONE, Shard
from aserve.planning import facts_of
from aserve.runner.host_budget import cpu_kv_budget

if TYPE_CHECKING:
    import torch

    from aserve.kernels.ops import Ops
    from aserve.models.interface import CausalLM


def measure(
    options: Options,
    model: "CausalLM",
    layout: KVLayout,
    ops: "Ops",
    cache_dtype: "torch.dtype",
    device: "torch.device",
    shard: Shard = ALONE,
) -> Facts:
    """What `resolve` needs to know of the model and the memory; on CUDA runs the largest step, if it must.

    shard: whose share the model is; all ranks measure at once, and on a CPU they share its memory.
    """
    from aserve.runner.profile import cuda_kv_budget, largest_step

    if options.kv_cache_memory_bytes is not None:
        budget_bytes = options.kv_cache_memory_bytes
    elif device.type == "cpu":
        budget_bytes = cpu_kv_budget() // shard.size
    else:
        num_tokens = options.max_num_batched_tokens or default_max_num_batched_tokens(
            device.type, model.spec.flops_per_token
        )
        max_model_len = min(options.max_model_len or model.spec.context_len, model.spec.context_len)
        plan = largest_step(
            options.max_num_seqs or default_max_num_seqs(),
            stretched(num_tokens, num_tokens),
            max_model_len,
            options.block_size,
            0 if options.speculative_config is None else options.speculative_config.num_speculative_tokens,
        )
        budget_bytes = cuda_kv_budget(
            model,
            ops,
            plan,
            cache_dtype=cache_dtype,
            device=device,
            block_size=options.block_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            captured_len=None if options.enforce_eager else max_model_len,
            shard=shard,
        )
    return facts_of(model.spec, layout, cache_dtype.itemsize, device.type, budget_bytes)
