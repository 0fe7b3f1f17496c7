"""What is loaded for an engine, whichever its runner: a device, a decoder in a thread, and what there is to know of it.

Importing this module loads no torch.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aserve.core.config import EngineConfig, ModelInfo, Options
from aserve.core.errors import CheckpointError, ConfigError, InvalidRequestError
from aserve.core.params import ALL_TOKENS, SamplingParams
from aserve.core.pooling import Pooling
from aserve.engine_parts import Progress
from aserve.models.sharding import ALONE, Shard
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

SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What of generation_config.json becomes a default of SamplingParams."""

Report = Callable[[Progress], None]


def choose_device(wish: str) -> "torch.device":
    """The device of an option: auto is CUDA where there is one. Raises `ConfigError` for cuda where there is none."""
    import torch

    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise ConfigError("device cuda: torch finds no GPU here")
    return torch.device("cuda", torch.cuda.current_device()) if available and wish != "cpu" else torch.device("cpu")


def sampling_defaults(options: Options, checkpoint: "Checkpoint") -> dict[str, Any]:
    """Those of a checkpoint, unless the options say that there are none. Raises `CheckpointError`."""
    return default_sampling(checkpoint.generation_config) if options.generation_config == "auto" else {}


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


def load_decoder(
    options: Options,
    checkpoint: "Checkpoint",
    device: "torch.device",
    ops: "Ops",
    lora: "LoraLayers | None",
    report: Report,
    shard: Shard = ALONE,
) -> "CausalLM":
    """The model, whose weights are read as the options say. Raises `CheckpointError`."""
    from aserve.models.loader import load_model

    return load_model(
        checkpoint,
        device=device,
        ops=ops,
        load_format=options.load_format,
        dtype=options.dtype,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        max_model_len=options.max_model_len,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
        lora=lora,
        shard=shard,
        progress=lambda stage, done, total: report(Progress(stage, done, total, "B")),
    )


def formats_of(
    options: Options, checkpoint: "Checkpoint", tokenizer: Tokenizer, chat_template: ChatTemplate
) -> tuple[str | None, str | None]:
    """How the model writes calls of tools, and thoughts. Raises `ConfigError` for a wish that there is not."""
    architecture = next(iter(checkpoint.config.get("architectures") or ()), None)
    own = own_formats(tokenizer.response_template)
    source = chat_template.source
    return (
        choose_calls(options.tool_call_parser, source, architecture, own.calls),
        choose_thoughts(options.reasoning_parser, source, architecture, own.thoughts),
    )


def model_info(
    options: Options,
    config: EngineConfig,
    vocab_size: int,
    checkpoint: "Checkpoint",
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    pooling: Pooling | None = None,
) -> ModelInfo:
    """What faces need to know. A local folder answers to its path and to its last part, unless names were given."""
    names = dict.fromkeys(
        (options.model, Path(options.model).name) if Path(options.model).is_dir() else (options.model,)
    )
    eos_ids = checkpoint.eos_ids or {tokenizer.eos_id} - {None}
    call_format, thought_format = formats_of(options, checkpoint, tokenizer, chat_template)
    return ModelInfo(
        names=options.served_model_name or tuple(names),
        root=options.model,
        vocab_size=vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=frozenset(eos_id for eos_id in eos_ids if eos_id is not None),
        created_s=int(time.time()),
        default_sampling=sampling_defaults(options, checkpoint),
        call_format=call_format,
        thought_format=thought_format,
        pooling=pooling,
        max_logprobs=vocab_size if options.max_logprobs == ALL_TOKENS else options.max_logprobs,
    )
