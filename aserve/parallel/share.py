"""A rank's share of a model, loaded and made a runner, in step with rank 0 (leader.py)."""

from collections.abc import Callable

from aserve.core.layout import lay_out
from aserve.kernels.dispatch import select_ops
from aserve.loading import load_decoder
from aserve.measuring import measure
from aserve.model_folder import find_model
from aserve.models.loader import cache_dtype_of, read_dtype
from aserve.models.lora import LoraLayers
from aserve.models.sharding import Shard
from aserve.parallel.task import RankTask, patience_s, rank_device
from aserve.runner.following import SharedDrafts
from aserve.runner.graph_device import graph_device
from aserve.runner.groups import make_group
from aserve.runner.kv_store import allocate_kv
from aserve.runner.rank_messages import Answer, Begin, Join, Loaded, Measured
from aserve.runner.runner import ModelRunner


def make_runner(task: RankTask, answer: Callable[[Answer], None], told: Callable[[], Join | Begin]) -> ModelRunner:
    """The runner that follows. answer: to rank 0. told: waits for what rank 0 tells next. Raises as `build.load`."""
    import torch

    options = task.options
    device = rank_device(options.device, task.rank, task.size)
    if device.type == "cpu":
        torch.set_num_threads(task.num_threads)
    checkpoint, pooling = find_model(options)
    dtype = read_dtype(checkpoint, options.dtype)
    cache_dtype = cache_dtype_of(dtype, options.kv_cache_dtype)
    ops = select_ops(device, batch_invariant=options.batch_invariant, kv_cache_dtype=options.kv_cache_dtype)
    group = make_group(task.rank, task.size, task.path, patience_s(options), device)
    shard = Shard(task.rank, task.size, group)
    lora = None
    if options.enable_lora:
        lora = LoraLayers(options.num_loras, options.max_lora_rank, ops, dtype, device, shard)
    model = load_decoder(options, checkpoint, device, ops, lora, lambda _progress: None, shard)
    layout = lay_out(model.spec.windows, options.max_model_len or model.spec.context_len)
    answer(Loaded())
    told()
    group.join()
    answer(Measured(measure(options, model, layout, ops, cache_dtype, device, shard).kv_budget_bytes))
    begin = told()
    assert isinstance(begin, Begin), "ranks have met"
    kv = allocate_kv(
        model.spec,
        num_blocks=begin.num_blocks,
        block_size=begin.block_size,
        dtype=cache_dtype,
        device=device,
        layout=layout,
    )
    runner = ModelRunner(
        model,
        ops,
        kv,
        max_num_seqs=begin.max_num_seqs,
        max_model_len=begin.max_model_len,
        num_host_blocks=begin.num_host_blocks,
        graph_device=None if options.enforce_eager or pooling is not None else graph_device(device),
        lora=lora,
        shard=shard,
    )
    if begin.num_drafts:
        runner.draft_with(lambda _: SharedDrafts(group, None, begin.max_num_seqs, begin.num_drafts, device))
    runner.take_blank()
    return runner
