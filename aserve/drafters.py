"""Who guesses tokens: prompt lookup, or a small model with a cache of its own, as `--speculative-config` says."""

from typing import TYPE_CHECKING

import msgspec

from aserve.core.config import EngineConfig, Options
from aserve.core.ports import Proposer
from aserve.drafting.draft_model import DraftModelProposer
from aserve.drafting.ngram import NgramProposer

if TYPE_CHECKING:
    import torch

    from aserve.kernels.ops import Ops
    from aserve.models.interface import CausalLM
    from aserve.runner.device import StepDevice
    from aserve.runner.draft_model import DraftModel


def draft_options(options: Options) -> Options | None:
    """The options of the model that makes drafts, by which it is found and loaded; None where none does."""
    wanted = options.speculative_config
    if wanted is None or wanted.model is None:
        return None
    return msgspec.structs.replace(
        options, model=wanted.model, revision=None, max_model_len=None, enable_lora=False, lora_modules=()
    )


def num_draft_blocks(config: EngineConfig) -> int:
    """Blocks of the draft model, the null block included: they hold as many tokens as those of the model."""
    return 1 + config.num_kv_tokens // config.block_size


def make_proposer(config: EngineConfig) -> Proposer | None:
    """Who guesses tokens: each of `METHODS` has one."""
    wanted = config.speculative_config
    if wanted is None:
        return None
    if wanted.model is None:
        return NgramProposer(
            most=wanted.num_speculative_tokens, shortest=wanted.prompt_lookup_min, longest=wanted.prompt_lookup_max
        )
    return DraftModelProposer(
        most=wanted.num_speculative_tokens,
        num_blocks=num_draft_blocks(config),
        block_size=config.block_size,
        num_rows=config.max_num_seqs,
        context_len=config.draft_context_len,
        max_catch_up=config.max_num_batched_tokens,
        step_seconds=config.draft_step_s,
    )


def make_draft_model(
    config: EngineConfig,
    model: "CausalLM",
    ops: "Ops",
    cache_dtype: "torch.dtype",
    torch_device: "torch.device",
    device: "StepDevice",
) -> "DraftModel":
    """What computes drafts in the runner whose device this is, with a cache and rows of its own."""
    from aserve.runner.draft_model import DraftModel
    from aserve.runner.kv_store import allocate_kv

    wanted = config.speculative_config
    assert wanted is not None, "somebody asked for drafts"
    kv = allocate_kv(
        model.spec,
        num_blocks=num_draft_blocks(config),
        block_size=config.block_size,
        dtype=cache_dtype,
        device=torch_device,
    )
    return DraftModel(
        model,
        ops,
        kv,
        device,
        num_rows=config.max_num_seqs,
        max_model_len=config.draft_context_len,
        most=wanted.num_speculative_tokens,
    )
