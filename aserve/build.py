"""From options to a running engine: the only place that knows every part, and chooses the variants.

    checkpoint -> device, dtype -> model -> tokenizer, template -> facts -> EngineConfig -> KV, runner -> scheduler

Importing this module loads no torch: that happens in `load`, which the engine calls in a worker thread while the event
loop goes on (a server answers /health meanwhile). torch's thread count belongs to the process and is left as it is:
OMP_NUM_THREADS, or one per physical core.
"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import msgspec

from aserve.adapters import Adapters
from aserve.core.config import (
    EngineConfig,
    Facts,
    ModelInfo,
    OptionFields,
    Options,
    resolve,
)
from aserve.core.errors import ConfigError, InsufficientMemoryError
from aserve.core.layout import KVLayout, lay_out
from aserve.core.threads import in_thread_that_ends
from aserve.drafters import draft_options, make_draft_model
from aserve.engine import Engine, EngineParts, Loader, Progress
from aserve.loading import Report, load_decoder, model_info
from aserve.measuring import measure
from aserve.model_folder import DEMO_MODEL, find_model
from aserve.model_text import check_draft_vocabulary, load_text
from aserve.models.pooling import PoolingPlan
from aserve.parallel.leader import Team, start_team
from aserve.parallel.task import rank_device
from aserve.planning import check_ranks, with_draft_model
from aserve.poolers import as_long_as_trained, check_options, load_encoder_parts, pooling_of, pools_of
from aserve.recorders import scheduler_of
from aserve.telling import describe_weights, draft_lines, plan_lines, pooling_lines, startup_lines

if TYPE_CHECKING:
    import torch

    from aserve.kernels.ops import Ops
    from aserve.models.checkpoint import Checkpoint
    from aserve.models.interface import CausalLM
    from aserve.models.lora import LoraLayers
    from aserve.runner.graph_device import GraphDevice
    from aserve.runner.parallel import ParallelRunner
    from aserve.runner.pooling import Pools
    from aserve.runner.runner import ModelRunner


class AsyncEngine(Engine):
    """A model inside your event loop: `async with AsyncEngine("folder or id") as engine: ...`.

    model: a folder, a Hugging Face id, or "demo", the bundled one. options: the fields of `Options`, which are the
    CLI's flags. on_progress: called with each stage of loading. Raises `ConfigError` for an option that is wrong;
    entering the context raises `CheckpointError` or `ConfigError` for what turns out while loading.
    """

    def __init__(
        self,
        model: str | PathLike[str] = DEMO_MODEL,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        super().__init__(loader(make_options(model=model, **options)), on_progress=on_progress)

    @classmethod
    def from_options(cls, options: Options, *, on_progress: Callable[[Progress], None] | None = None) -> Self:
        """The same from Options that were read and checked elsewhere, by the CLI say."""
        return cls(on_progress=on_progress, **msgspec.structs.asdict(options))

    def startup_lines(self) -> list[str]:
        """What was decided at loading, for people; see `startup_lines`. Raises `UnavailableError` before."""
        return startup_lines(self._ready())


def make_options(**fields: Any) -> Options:
    """Options from keyword arguments. Raises `ConfigError` naming the field, of an unknown one the nearest known."""
    for name in fields:
        if name not in Options.__struct_fields__:
            nearest = difflib.get_close_matches(name, Options.__struct_fields__, n=1)
            raise ConfigError(f"unknown option {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    return Options(**fields)


def loader(options: Options, settled: EngineConfig | None = None) -> Loader:
    """What an engine needs to load these options' model. settled: see `load`."""
    return partial(load, options, settled=settled)


def load(options: Options, report: Report, settled: EngineConfig | None = None) -> EngineParts:
    """Make every part; takes seconds, blocks, and may be called in any thread.

    settled: what was decided elsewhere, so that nothing is decided by this machine: blocks and rows are as there.

    Raises `CheckpointError` for a model that cannot be found, read or served, `ConfigError` for an option that this
    machine or model cannot meet.
    """
    report(Progress("finding the model"))
    checkpoint, plan = find_model(options)
    check_ranks(options, checkpoint)
    if plan is not None:
        check_options(options, plan)
    of_draft = draft_options(options)
    draft_checkpoint = None if of_draft is None else find_model(of_draft)[0]
    report(Progress("loading torch"))
    from torch import OutOfMemoryError

    try:
        if plan is not None and not plan.pooling.is_causal:
            return in_thread_that_ends(partial(load_encoder_parts, options, checkpoint, plan, report))
        return _load(options, checkpoint, plan, draft_checkpoint, report, settled)
    except (OutOfMemoryError, InsufficientMemoryError) as error:
        reason = str(error.__cause__ or error).partition(". Of the allocated")[0]
        raise ConfigError(
            "the weights, the largest step and its KV cache do not fit the GPU: lower max_num_batched_tokens, "
            f"max_num_seqs, gpu_memory_utilization or kv_cache_memory_bytes, or free memory ({reason})"
        ) from error


class _Loaded(NamedTuple):
    """What a runner is made of.

    draft_model, lora, pools: None where no model makes drafts, where rows have no adapters, where text is generated.
    """

    model: "CausalLM"
    draft_model: "CausalLM | None"
    lora: "LoraLayers | None"
    ops: "Ops"
    cache_dtype: "torch.dtype"
    device: "torch.device"
    graphs: "GraphDevice | None"
    pools: "Pools | None" = None
    team: Team = Team()


def _load(
    options: Options,
    checkpoint: "Checkpoint",
    plan: PoolingPlan | None,
    draft_checkpoint: "Checkpoint | None",
    report: Report,
    settled: EngineConfig | None,
) -> EngineParts:
    device = rank_device(options.device, 0, options.tensor_parallel_size)
    team = start_team(options, checkpoint, device)  # whose ranks the system ends with the thread that started them
    try:
        first = partial(_load_first, options, checkpoint, plan, draft_checkpoint, report, settled, device, team)
        return in_thread_that_ends(first)
    except BaseException:
        team.close()
        raise


def _load_first(
    options: Options,
    checkpoint: "Checkpoint",
    plan: PoolingPlan | None,
    draft_checkpoint: "Checkpoint | None",
    report: Report,
    settled: EngineConfig | None,
    device: "torch.device",
    team: Team,
) -> EngineParts:
    """The parts of an engine whose other ranks, if there are any, load beside it."""
    from aserve.kernels.dispatch import describe, select_ops
    from aserve.models.loader import cache_dtype_of, read_dtype
    from aserve.runner.graph_device import graph_device

    dtype = read_dtype(checkpoint, options.dtype)
    cache_dtype = cache_dtype_of(dtype, options.kv_cache_dtype)
    ops = select_ops(device, batch_invariant=options.batch_invariant, kv_cache_dtype=options.kv_cache_dtype)
    lora = None
    if options.enable_lora:
        from aserve.models.lora import LoraLayers

        lora = LoraLayers(options.num_loras, options.max_lora_rank, ops, dtype, device, team.shard)
    model = load_decoder(options, checkpoint, device, ops, lora, report, team.shard)
    report(Progress("tokenizer"))
    tokenizer, chat_template = load_text(options, checkpoint, model.spec.vocab_size)
    draft_model = None
    if draft_checkpoint is not None and (of_draft := draft_options(options)) is not None:
        of_draft = msgspec.structs.replace(of_draft, dtype=_name(dtype))
        draft_model = load_decoder(of_draft, draft_checkpoint, device, ops, None, report)
        check_draft_vocabulary(draft_checkpoint, draft_model.spec.vocab_size, tokenizer, model.spec.vocab_size)

    pooling = pools = None
    if plan is not None:
        options = as_long_as_trained(options, plan, model.spec.context_len)
        pooling = pooling_of(options, plan, model.spec.hidden_size)
        pools = pools_of(options, plan, checkpoint, model, tokenizer, device)
    report(Progress("memory"))
    layout = lay_out(model.spec.windows, options.max_model_len or model.spec.context_len)
    team.meet()
    facts = team.least(measure(options, model, layout, ops, cache_dtype, device, team.shard))
    facts = with_draft_model(facts, None if draft_model is None else draft_model.spec, cache_dtype.itemsize)
    config = _settled(settled, facts) or resolve(options, msgspec.structs.replace(facts, pooling=pooling))
    info = model_info(options, config, model.spec.vocab_size, checkpoint, tokenizer, chat_template, pooling)
    weights = f"{describe_weights(options, checkpoint)} as {_name(dtype)} on {device}"
    graphs = None if options.enforce_eager or pools is not None else graph_device(device)
    team.begin(config)
    loaded = _Loaded(model, draft_model, lora, ops, cache_dtype, device, graphs, pools, team)
    runner, config = _runner(config, layout, loaded, report)
    adapters = _adapters(options, info, runner)
    if pooling is None:
        told = plan_lines(options, info, config, facts, weights, tokenizer.response_template)
        lines = *told, *draft_lines(options, config, facts, draft_checkpoint)
    else:
        lines = pooling_lines(info, config, pooling, weights)
    notes = (*lines, *team.lines, *describe(ops, options.quantization), *config.notes)
    with _closing_on_failure(runner):
        scheduler, on_close = scheduler_of(options, config, info, checkpoint, str(device), _name(dtype))
    config = msgspec.structs.replace(config, notes=notes)
    return EngineParts(info, config, scheduler, runner, tokenizer, chat_template, adapters, on_close)


def _settled(settled: EngineConfig | None, facts: Facts) -> EngineConfig | None:
    """What was decided elsewhere. Raises `ConfigError` where it does not fit the model."""
    if settled is None:
        return None
    if settled.kv_windows != facts.kv_windows or settled.max_model_len > facts.context_len:
        raise ConfigError(
            f"a context of {settled.max_model_len} tokens with windows {settled.kv_windows} is not this model's, "
            f"which has {facts.context_len} tokens and {facts.kv_windows}"
        )
    return settled


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _closing_on_failure(runner: "ModelRunner | ParallelRunner") -> Iterator[None]:
    try:
        yield
    except BaseException:
        runner.close()
        raise


def _runner(
    config: EngineConfig, layout: KVLayout, loaded: _Loaded, report: Report
) -> "tuple[ModelRunner | ParallelRunner, EngineConfig]":
    """The runner, warm, and the configuration with what it measured."""
    from aserve.runner.kv_store import allocate_kv
    from aserve.runner.runner import ModelRunner

    runner = ModelRunner(
        loaded.model,
        loaded.ops,
        allocate_kv(
            loaded.model.spec,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=loaded.cache_dtype,
            device=loaded.device,
            layout=layout,
        ),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_host_blocks=config.num_host_blocks,
        graph_device=loaded.graphs,
        lora=loaded.lora,
        pools=loaded.pools,
        shard=loaded.team.shard,
        followers=loaded.team.ranks,
    )
    report(Progress("warming up"))
    with ExitStack() as on_failure:
        on_failure.callback(runner.close)
        if loaded.draft_model is not None:
            made_of = loaded.draft_model, loaded.ops, loaded.cache_dtype, loaded.device
            make = partial(make_draft_model, config, *made_of)
            runner.draft_with(lambda device: loaded.team.drafts(make(device), config, loaded.device))
        runner.warm_up()
        config = msgspec.structs.replace(config, graph_sizes=runner.graph_sizes)
        if config.num_host_blocks:
            costs = runner.measure_costs()
            config = msgspec.structs.replace(config, recompute_cost_s=costs.recompute_s, swap_cost_s=costs.swap_s)
        if loaded.draft_model is not None and config.speculative_config is not None:
            step_s = runner.measure_drafting(config.speculative_config.num_speculative_tokens)
            config = msgspec.structs.replace(config, draft_step_s=step_s)
        on_failure.pop_all()
    return loaded.team.runner(runner), config


def _adapters(options: Options, info: ModelInfo, runner: "ModelRunner | ParallelRunner") -> Adapters:
    """Those that were named, loaded. Raises `AdapterError` for one that is refused."""
    adapters = Adapters(
        runner if options.enable_lora else None,
        max_loaded=options.num_cpu_loras,
        root=options.lora_root,
        taken=info.names,
    )
    with _closing_on_failure(runner):
        for name, folder in options.lora_modules:
            adapters.add_now(name, folder)
    return adapters
