"""From options to a running engine: the only place that knows every part, and chooses the variants.

    checkpoint -> device, dtype -> model -> tokenizer, template -> facts -> EngineConfig -> KV, runner -> scheduler

Importing this module loads no torch: that happens in `load`, which the engine calls in a worker thread while the event
loop goes on (a server answers /health meanwhile). torch's thread count belongs to the process and is left as it is:
OMP_NUM_THREADS, or one per physical core.
"""

import difflib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, Unpack

import msgspec

from aserve.adapters import Adapters
from aserve.core.config import (
    EngineConfig,
    ModelInfo,
    OptionFields,
    Options,
    resolve,
)
from aserve.core.errors import CheckpointError, ConfigError, InsufficientMemoryError, InvalidRequestError
from aserve.core.layout import KVLayout, lay_out
from aserve.core.params import SamplingParams
from aserve.drafters import draft_options, make_draft_model, make_proposer
from aserve.engine import Engine, EngineParts, Loader, Progress
from aserve.kv_cache.host_memory import has_host_tier
from aserve.measuring import measure, with_draft_model
from aserve.model_folder import DEMO_MODEL, check_draft_vocabulary, find_model, load_text
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import Policy, first_come_first_served, priority_with_ageing
from aserve.scheduler.scheduler import Scheduler
from aserve.telling import describe_weights, draft_lines, plan_lines, startup_lines
from aserve.text.chat_template import ChatTemplate
from aserve.text.formats.choice import choose_calls, choose_thoughts
from aserve.text.formats.named import own_formats
from aserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from aserve.kernels.ops import Ops
    from aserve.models.checkpoint import Checkpoint
    from aserve.models.interface import CausalLM
    from aserve.models.lora import LoraLayers
    from aserve.runner.graph_device import GraphDevice
    from aserve.runner.runner import ModelRunner

SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What of generation_config.json becomes a default of SamplingParams."""
PRIORITY_AGEING_S: Final = 10.0
"""Under the priority policy a level is worth this many seconds of waiting."""

Report = Callable[[Progress], None]


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


def loader(options: Options) -> Loader:
    """What an engine needs to load these options' model."""
    return partial(load, options)


def load(options: Options, report: Report) -> EngineParts:
    """Make every part; takes seconds, blocks, and may be called in any thread.

    Raises `CheckpointError` for a model that cannot be found, read or served, `ConfigError` for an option that this
    machine or model cannot meet.
    """
    report(Progress("finding the model"))
    checkpoint = find_model(options)
    of_draft = draft_options(options)
    draft_checkpoint = None if of_draft is None else find_model(of_draft)
    report(Progress("loading torch"))
    from torch import OutOfMemoryError

    try:
        return _load(options, checkpoint, draft_checkpoint, report)
    except (OutOfMemoryError, InsufficientMemoryError) as error:
        reason = str(error.__cause__ or error).partition(". Of the allocated")[0]
        raise ConfigError(
            "the weights, the largest step and its KV cache do not fit the GPU: lower max_num_batched_tokens, "
            f"max_num_seqs, gpu_memory_utilization or kv_cache_memory_bytes, or free memory ({reason})"
        ) from error


class _Loaded(NamedTuple):
    """What a runner is made of. draft_model, lora: None where no model makes drafts, where rows have no adapters."""

    model: "CausalLM"
    draft_model: "CausalLM | None"
    lora: "LoraLayers | None"
    ops: "Ops"
    dtype: "torch.dtype"
    device: "torch.device"
    graphs: "GraphDevice | None"


def _load(
    options: Options, checkpoint: "Checkpoint", draft_checkpoint: "Checkpoint | None", report: Report
) -> EngineParts:
    from aserve.kernels.dispatch import describe, select_ops
    from aserve.models.loader import read_dtype
    from aserve.runner.graph_device import graph_device

    device = choose_device(options.device)
    dtype = read_dtype(checkpoint, options.dtype)
    ops = select_ops(device, batch_invariant=options.batch_invariant)
    lora = None
    if options.enable_lora:
        from aserve.models.lora import LoraLayers

        lora = LoraLayers(options.max_loras, options.max_lora_rank, ops, dtype, device)
    model = _load_model(options, checkpoint, device, ops, lora, report)

    report(Progress("tokenizer"))
    tokenizer, chat_template = load_text(options, checkpoint, model.spec.vocab_size)
    draft_model = None
    if draft_checkpoint is not None and (of_draft := draft_options(options)) is not None:
        of_draft = msgspec.structs.replace(of_draft, dtype=str(dtype).removeprefix("torch."))
        draft_model = _load_model(of_draft, draft_checkpoint, device, ops, None, report)
        check_draft_vocabulary(draft_checkpoint, draft_model.spec.vocab_size, tokenizer, model.spec.vocab_size)

    report(Progress("memory"))
    layout = lay_out(model.spec.windows, options.max_model_len or model.spec.context_len)
    facts = with_draft_model(measure(options, model, layout, ops, dtype, device), draft_model, dtype)
    config = resolve(options, facts)
    info = _model_info(options, config, model, checkpoint, tokenizer, chat_template)
    weights = f"{describe_weights(options, checkpoint)} as {str(dtype).removeprefix('torch.')} on {device}"
    graphs = None if options.enforce_eager else graph_device(device)
    loaded = _Loaded(model, draft_model, lora, ops, dtype, device, graphs)
    runner, config = _runner(config, layout, loaded, report)
    adapters = _adapters(options, info, runner)
    unread = own_formats(tokenizer.response_template).problems
    plan = *plan_lines(info, config, facts, weights, unread), *draft_lines(options, config, facts, draft_checkpoint)
    notes = (*plan, *filter(None, [describe(ops)]), *config.notes)
    return EngineParts(
        info=info,
        config=msgspec.structs.replace(config, notes=notes),
        scheduler=make_scheduler(config),
        runner=runner,
        tokenizer=tokenizer,
        chat_template=chat_template,
        adapters=adapters,
    )


def choose_device(wish: str) -> "torch.device":
    """The device of an option: auto is CUDA where there is one. Raises `ConfigError` for cuda where there is none."""
    import torch

    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise ConfigError("device cuda: torch finds no GPU here")
    return torch.device("cuda", torch.cuda.current_device()) if available and wish != "cpu" else torch.device("cpu")


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that generation_config.json sets, as vLLM reads it: fields present, do_sample ignored.

    A checkpoint with do_sample false and a temperature therefore samples at that temperature; one without a temperature
    at 1, as the OpenAI API says. Raises `CheckpointError` for values that no request may have.
    """
    fields = {name: generation_config[name] for name in SAMPLING_FIELDS if generation_config.get(name) is not None}
    try:
        params = SamplingParams(**fields)
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json: {error}; --generation-config none ignores it") from error
    return {name: getattr(params, name) for name in fields}


def _load_model(
    options: Options,
    checkpoint: "Checkpoint",
    device: "torch.device",
    ops: "Ops",
    lora: "LoraLayers | None",
    report: Report,
) -> "CausalLM":
    """Load in a thread that ends.

    It has threads of torch's own, which would be there as long as it is. OpenMP lets those that wait for the next
    matrix product spin only as long as all of them fit the processors, and to wake one that sleeps takes longer than
    many a product: beside idle ones a token of a small model takes 27 ms in place of 20.
    """
    from aserve.models.loader import load_model

    load = partial(
        load_model,
        checkpoint,
        device=device,
        ops=ops,
        load_format=options.load_format,
        dtype=options.dtype,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        max_model_len=options.max_model_len,
        batch_invariant=options.batch_invariant,
        lora=lora,
        progress=lambda stage, done, total: report(Progress(stage, done, total)),
    )
    with ThreadPoolExecutor(1, thread_name_prefix="aserve-loader") as loader:
        return loader.submit(load).result()


def _model_info(
    options: Options,
    config: EngineConfig,
    model: "CausalLM",
    checkpoint: "Checkpoint",
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
) -> ModelInfo:
    """A local folder answers to its path and to its last part, unless names were given."""
    names = dict.fromkeys(
        (options.model, Path(options.model).name) if Path(options.model).is_dir() else (options.model,)
    )
    eos_ids = checkpoint.eos_ids or {tokenizer.eos_id} - {None}
    applies = options.generation_config == "auto"
    architecture = next(iter(checkpoint.config.get("architectures") or ()), None)
    own = own_formats(tokenizer.response_template)
    return ModelInfo(
        names=options.served_model_name or tuple(names),
        root=options.model,
        vocab_size=model.spec.vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=frozenset(eos_id for eos_id in eos_ids if eos_id is not None),
        created_s=int(time.time()),
        default_sampling=default_sampling(checkpoint.generation_config) if applies else {},
        call_format=choose_calls(options.tool_call_parser, chat_template.source, architecture, own.calls),
        thought_format=choose_thoughts(options.reasoning_parser, chat_template.source, architecture, own.thoughts),
    )


def _runner(
    config: EngineConfig, layout: KVLayout, loaded: _Loaded, report: Report
) -> "tuple[ModelRunner, EngineConfig]":
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
            dtype=loaded.dtype,
            device=loaded.device,
            layout=layout,
        ),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_host_blocks=config.num_host_blocks,
        graph_device=loaded.graphs,
        lora=loaded.lora,
    )
    report(Progress("warming up"))
    with ExitStack() as on_failure:
        on_failure.callback(runner.close)
        if loaded.draft_model is not None:
            made_of = loaded.draft_model, loaded.ops, loaded.dtype, loaded.device
            runner.draft_with(partial(make_draft_model, config, *made_of))
        runner.warm_up()
        if config.num_host_blocks:
            costs = runner.measure_costs()
            config = msgspec.structs.replace(config, recompute_cost_s=costs.recompute_s, swap_cost_s=costs.swap_s)
        if loaded.draft_model is not None and config.speculative_config is not None:
            step_s = runner.measure_drafting(config.speculative_config.num_speculative_tokens)
            config = msgspec.structs.replace(config, draft_step_s=step_s)
        on_failure.pop_all()
    return runner, config


def _adapters(options: Options, info: ModelInfo, runner: "ModelRunner") -> Adapters:
    """Those that were named, loaded. Raises `AdapterError` for one that is refused."""
    adapters = Adapters(
        runner if options.enable_lora else None,
        max_loaded=options.num_cpu_loras,
        root=options.lora_root,
        taken=info.names,
    )
    try:
        for name, folder in options.lora_modules:
            adapters.add_now(name, folder)
    except BaseException:
        runner.close()
        raise
    return adapters


def make_scheduler(config: EngineConfig) -> Scheduler:
    """A scheduler with the limits and the policies of a configuration."""
    policies: dict[str, Policy] = {
        "fcfs": first_come_first_served,
        "priority": priority_with_ageing(PRIORITY_AGEING_S),
        "fair": priority_with_ageing(PRIORITY_AGEING_S),
    }
    return Scheduler(
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=config.num_host_blocks,
        preemption=PreemptionRule(
            config.preemption_mode, recompute_cost_s=config.recompute_cost_s, swap_cost_s=config.swap_cost_s
        ),
        policy=policies[config.scheduling_policy],
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduler_delay_factor=config.scheduler_delay_factor,
        max_num_queued_reqs=config.max_num_queued_reqs,
        windows=config.kv_windows,
        keeps_evicted=has_host_tier(config),
        max_in_flight=config.max_in_flight,
        plans_behind_prompts=config.plans_behind_prompts,
        is_fair=config.scheduling_policy == "fair",
        target_itl_s=None if config.target_itl_ms is None else config.target_itl_ms / 1e3,
        itl_factor=config.itl_factor,
        proposer=make_proposer(config),
        max_loras=config.max_loras,
    )
