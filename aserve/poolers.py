"""What an engine that pools is made of besides what any engine is: its options, its head, and an encoder's parts."""

from typing import TYPE_CHECKING, Final

import msgspec

from aserve.core.config import Facts, Options, resolve
from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.pooling import Pooling
from aserve.engine_parts import EngineParts, Progress
from aserve.loading import Report, choose_device, model_info
from aserve.model_text import load_text
from aserve.models.pooling import PoolingPlan
from aserve.scheduling import make_scheduler
from aserve.telling import describe_weights, pooling_lines
from aserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from aserve.models.checkpoint import Checkpoint
    from aserve.models.encoder import Encoder
    from aserve.models.interface import CausalLM
    from aserve.runner.pooling import Pools

ENCODER_BLOCK_SIZE: Final = 256
"""Of blocks that hold nothing: the fewer, the less there is to hand out."""
PLENTY: Final = 2**40
"""Bytes of a cache that an encoder does not have."""


def check_options(options: Options, plan: PoolingPlan) -> None:
    """Raise `ConfigError` for options that are about generating, or about caches that are not there."""
    for name, is_wanted in (
        ("speculative_config", options.speculative_config is not None),
        ("enable_lora", options.enable_lora),
        ("swap_space", options.swap_space > 0.0),
        ("record", options.record is not None),
        ("batch_invariant", options.batch_invariant and not plan.pooling.is_causal),
        ("quantization", options.quantization is not None and not plan.pooling.is_causal),
        ("kv_cache_dtype", options.kv_cache_dtype != "auto" and not plan.pooling.is_causal),
        ("trust_remote_code", options.trust_remote_code and not plan.pooling.is_causal),
    ):
        if is_wanted:
            raise ConfigError(f"{name}: not with a model that pools (--runner pooling)")


def as_long_as_trained(options: Options, plan: PoolingPlan, context_len: int) -> Options:
    """With the length at which sentence-transformers cuts inputs, unless another was asked for."""
    if plan.max_len is None or options.max_model_len is not None:
        return options
    return msgspec.structs.replace(options, max_model_len=min(plan.max_len, context_len))


def pooling_of(options: Options, plan: PoolingPlan, hidden_size: int) -> Pooling:
    """What is known of the pooling once the model is there."""
    return msgspec.structs.replace(
        plan.pooling, size=plan.pooling.size or hidden_size, takes_templates=options.chat_template is not None
    )


def pools_of(
    options: Options,
    plan: PoolingPlan,
    checkpoint: "Checkpoint",
    model: "CausalLM",
    tokenizer: Tokenizer,
    device: "torch.device",
) -> "Pools":
    """How a decoder's hidden states are pooled. Raises `CheckpointError` for a head that is not there."""
    from aserve.models.pooler_head import load_head
    from aserve.runner.pooling import Pools

    token_ids = [tokenizer.token_id(name) for name in plan.token_names]
    for name, token_id in zip(plan.token_names, token_ids, strict=True):
        if token_id is None or token_id >= model.spec.vocab_size:
            raise CheckpointError(f"classifier_from_token: {name!a} is no token of the model's")
    ids = [token_id for token_id in token_ids if token_id is not None]
    head = load_head(checkpoint, plan, model.spec.hidden_size, ids, device, seed_of(options))
    return Pools(plan.pooling.method, head)


def seed_of(options: Options) -> int | None:
    """Of weights that are drawn; None where they are read."""
    return options.seed if options.load_format == "dummy" else None


def load_encoder_parts(options: Options, checkpoint: "Checkpoint", plan: PoolingPlan, report: Report) -> EngineParts:
    """An engine of an encoder: no cache, and each prompt is computed at once. Raises as `build.load`."""
    from aserve.models.encoder import load_encoder
    from aserve.models.loader import read_dtype
    from aserve.runner.encoder import EncoderRunner

    device = choose_device(options.device)
    dtype = read_dtype(checkpoint, options.dtype)
    report(Progress("weights", 0, 1))
    encoder = load_encoder(checkpoint, plan, dtype, device, seed_of(options))
    report(Progress("weights", 1, 1))
    report(Progress("tokenizer"))
    tokenizer, chat_template = load_text(options, checkpoint, encoder.vocab_size)
    options = as_long_as_trained(options, plan, encoder.context_len)
    pooling = pooling_of(options, plan, encoder.hidden_size)
    bookkeeping = msgspec.structs.replace(options, block_size=ENCODER_BLOCK_SIZE, kv_cache_memory_bytes=None)
    config = resolve(bookkeeping, _facts(encoder, pooling, device))
    info = model_info(options, config, encoder.vocab_size, checkpoint, tokenizer, chat_template, pooling)
    weights = f"{describe_weights(options, checkpoint)} as {str(dtype).removeprefix('torch.')} on {device}"
    runner = EncoderRunner(encoder)
    report(Progress("warming up"))
    runner.warm_up()
    return EngineParts(
        info=info,
        config=msgspec.structs.replace(config, notes=pooling_lines(info, config, pooling, weights)),
        scheduler=make_scheduler(config),
        runner=runner,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


def _facts(encoder: "Encoder", pooling: Pooling, device: "torch.device") -> Facts:
    return Facts(
        device=device.type,
        context_len=encoder.context_len,
        kv_bytes_per_token=1,
        kv_budget_bytes=PLENTY,
        flops_per_token=2 * encoder.num_parameters,
        pooling=pooling,
    )
