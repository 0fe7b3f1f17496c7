"""Plan: the numbers of a model on a machine, by the same arithmetic as the engine's own (aserve/planning.py, resolve).

On a CPU they are what the engine will have. On a GPU the largest step has to be run to know them, so that they are
about right; and so are those of models that transformers computes.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from aserve.cli.doctor.machine import Kernels, size
from aserve.core.config import EngineConfig, Facts, GiB, Options, resolve
from aserve.core.errors import AserveError
from aserve.core.quantization import why_no_cache
from aserve.drafters import draft_options
from aserve.model_folder import find_model
from aserve.models.checkpoint import Checkpoint
from aserve.models.pooling import PoolingPlan
from aserve.models.spec import dtype_name, read_architecture
from aserve.planning import (
    cache_dtype_bytes,
    check_ranks,
    foretold_facts,
    is_native,
    spec_of,
    why_not_quantized,
    with_draft_model,
)
from aserve.runner.host_budget import cpu_kv_budget, host_memory_bytes
from aserve.weight_plan import WeightPlan, plan_weights

if TYPE_CHECKING:
    import torch

    from aserve.models.spec import ModelSpec

STEP_BYTES: Final = GiB
"""Of the largest step on a GPU, about: it is measured when a model is loaded."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """device: cpu or cuda, and its name. free_bytes, total_bytes: of its memory. read_bytes_per_s: measured.

    why_no_gpu: None where there is one, or none was asked for.
    """

    device: str
    name: str
    num_cores: int
    free_bytes: int
    total_bytes: int
    read_bytes_per_s: float
    kernels: Kernels | None
    why_no_gpu: str | None = None


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. num_full_len: sequences of max_model_len that run at once."""

    bytes_per_token: int
    block_size: int
    num_blocks: int
    num_tokens: int
    num_bytes: int
    max_model_len: int
    num_full_len: int
    max_num_seqs: int


class Problem(msgspec.Struct, frozen=True):
    """What is amiss, and what helps. stops: the model cannot be served so."""

    what: str
    help: str
    stops: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. is_exact: the numbers are those that the engine will have. tokens_per_s: of one answer, at most.

    task: generate, or what the model pools for. max_model_len: as it was wished for. kv: None where nothing is
    generated, or too little is known; where there are several ranks, that of each.
    """

    model: str
    folder: str
    architecture: str
    is_native: bool
    is_exact: bool
    task: str
    dtype: str
    quantization: str | None
    context_len: int | None
    max_model_len: int | None
    weights: WeightPlan
    kv: KVPlan | None
    tokens_per_s: float | None
    machine: Machine
    has_tokenizer: bool
    has_chat_template: bool
    call_format: str | None
    thought_format: str | None
    problems: tuple[Problem, ...]
    num_ranks: int = 1

    @property
    def can_run(self) -> bool:
        """Whether nothing stops it."""
        return not any(problem.stops for problem in self.problems)


def make_plan(options: Options, machine: Machine, *, copies_tied_head: bool) -> Plan:
    """Of a model that is on this machine. copies_tied_head: as of `plan_weights`.

    Raises `CheckpointError` or `ConfigError` for one that could not be served on any.
    """
    checkpoint, pooling = find_model(options)
    check_ranks(options, checkpoint)
    spec = spec_of(checkpoint)
    weights = plan_weights(checkpoint, spec, options, copies_tied_head=copies_tied_head)
    problems = [*_memory_problems(options, weights, machine), *_machine_problems(machine)]
    if reason := why_not_quantized(options, checkpoint, machine.device):
        problems.append(Problem(reason, "", stops=True))
    if reason := why_no_cache(options.kv_cache_dtype, machine.device):
        problems.append(Problem(reason, "", stops=True))
    kv = None
    if pooling is None and spec is not None:
        try:
            kv = _kv_plan(options, checkpoint, spec, weights, machine)
        except AserveError as error:
            problems.append(Problem(error.message, "", stops=True))
    texts = _Texts(options, checkpoint, 0 if spec is None else spec.vocab_size, is_chat=pooling is None)
    problems += texts.problems
    per_token = weights.bytes_per_token
    return Plan(
        model=options.model,
        folder=str(checkpoint.path),
        architecture=read_architecture(checkpoint.config),
        is_native=is_native(checkpoint),
        is_exact=is_native(checkpoint) and machine.device == "cpu",
        task=_task(pooling),
        dtype=dtype_name(checkpoint.config, options.dtype),
        quantization=options.quantization,
        context_len=None if spec is None else spec.context_len,
        max_model_len=options.max_model_len,
        weights=weights,
        kv=kv,
        num_ranks=options.tensor_parallel_size,
        tokens_per_s=_num_memories(options, machine) * machine.read_bytes_per_s / per_token
        if per_token and pooling is None
        else None,
        machine=machine,
        has_tokenizer=texts.has_tokenizer,
        has_chat_template=texts.has_chat_template,
        call_format=texts.call_format,
        thought_format=texts.thought_format,
        problems=tuple(problems),
    )


def _task(pooling: PoolingPlan | None) -> str:
    return "generate" if pooling is None else pooling.pooling.task


def _kv_plan(
    options: Options, checkpoint: Checkpoint, spec: "ModelSpec", weights: WeightPlan, machine: Machine
) -> KVPlan:
    facts = foretold_facts(options, checkpoint, spec, machine.device, _budget(options, weights, machine))
    if (of_draft := draft_options(options)) is not None:
        draft = spec_of(find_model(of_draft)[0])
        facts = with_draft_model(facts, draft, cache_dtype_bytes(options, checkpoint))
    config = resolve(options, facts)
    return kv_plan_of(config, facts)


def kv_plan_of(config: EngineConfig, facts: Facts) -> KVPlan:
    """Of what was decided."""
    return KVPlan(
        bytes_per_token=facts.kv_bytes_per_token * len(facts.kv_windows),
        block_size=config.block_size,
        num_blocks=config.num_blocks - 1,
        num_tokens=config.num_kv_tokens,
        num_bytes=config.num_blocks * config.block_size * facts.kv_bytes_per_token,
        max_model_len=config.max_model_len,
        num_full_len=config.num_full_len,
        max_num_seqs=config.max_num_seqs,
    )


def _budget(options: Options, weights: WeightPlan, machine: Machine) -> int:
    if machine.device == "cpu":
        return cpu_kv_budget() // options.tensor_parallel_size
    ours = int(machine.total_bytes * options.gpu_memory_utilization)
    return max(0, min(ours, machine.free_bytes) - weights.memory_bytes // options.tensor_parallel_size - STEP_BYTES)


def _num_memories(options: Options, machine: Machine) -> int:
    """GPUs that share the model, each with a memory of its own; processes on a CPU have one together."""
    return options.tensor_parallel_size if machine.device == "cuda" else 1


def _memory_problems(options: Options, weights: WeightPlan, machine: Machine) -> list[Problem]:
    num_memories = _num_memories(options, machine)
    if weights.memory_bytes <= num_memories * machine.free_bytes:
        return []
    share = "" if num_memories == 1 else f" on each of {num_memories} GPUs"
    what = (
        f"the weights take {size(weights.memory_bytes // num_memories)}{share}, and {size(machine.free_bytes)} of "
        f"{'the GPU' if machine.device == 'cuda' else 'memory'} are free"
    )
    less = "--quantization fp8 or " if machine.device == "cuda" else "--quantization int8, --dtype bfloat16 or "
    return [Problem(what, f"{less}a smaller model", stops=True)]


def _machine_problems(machine: Machine) -> list[Problem]:
    found = []
    if machine.why_no_gpu is not None:
        found.append(Problem(f"no GPU is used, since {machine.why_no_gpu}", ""))
    if machine.kernels is not None and machine.kernels.kind == "torch":
        found.append(Problem(f"aserve's own kernels are not used, since {machine.kernels.detail}", ""))
    return found


class _Texts:
    """The model's tokenizer and chat template, loaded as the engine loads them."""

    def __init__(self, options: Options, checkpoint: Checkpoint, vocab_size: int, *, is_chat: bool) -> None:
        from aserve.loading import formats_of, sampling_defaults
        from aserve.model_text import load_text

        self.problems: list[Problem] = []
        self.has_tokenizer = self.has_chat_template = False
        self.call_format: str | None = None
        self.thought_format: str | None = None
        self.has_tokenizer = checkpoint.has_tokenizer or options.tokenizer is not None
        try:
            sampling_defaults(options, checkpoint)
        except AserveError as error:
            self.problems.append(Problem(error.message, "", stops=True))
        try:
            tokenizer, template = load_text(options, checkpoint, vocab_size or 2**31)
            self.call_format, self.thought_format = formats_of(options, checkpoint, tokenizer, template)
        except AserveError as error:
            helps = "" if self.has_tokenizer else "--tokenizer names another folder that has one"
            self.problems.append(Problem(error.message, helps, stops=True))
            return
        self.has_tokenizer = True
        self.has_chat_template = bool(template.source)
        if is_chat and not self.has_chat_template:
            helps = "--chat-template FILE gives it one; completions work without"
            self.problems.append(Problem("there is no chat template, so that chats are refused", helps))
        elif is_chat and template.problem is not None:
            helps = "--chat-template FILE replaces it; completions work without"
            self.problems.append(Problem(f"{template.problem}; so chats are refused", helps))


def here(device: "torch.device", wish: str) -> Machine:
    """This machine, measured; takes less than a second. wish: the device that was asked for."""
    from aserve.cli.checks import why_no_gpu
    from aserve.cli.doctor import machine

    cores, speed = machine.num_cores(), machine.read_bytes_per_s(device)
    if device.type == "cuda":
        import torch

        free, total = machine.gpu_memory(device)
        return Machine(
            device="cuda",
            name=torch.cuda.get_device_name(device),
            num_cores=cores,
            free_bytes=free,
            total_bytes=total,
            read_bytes_per_s=speed,
            kernels=None,
        )
    return Machine(
        device="cpu",
        name=f"{cores} cores",
        num_cores=cores,
        free_bytes=machine.free_memory_bytes(),
        total_bytes=host_memory_bytes(),
        read_bytes_per_s=speed,
        kernels=machine.cpu_kernels(),
        why_no_gpu=None if wish == "cpu" else why_no_gpu(),
    )
