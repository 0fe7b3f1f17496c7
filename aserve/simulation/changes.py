"""What a simulation may change of a recorded configuration, and whether that goes together."""

import difflib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.config import BLOCK_SIZES, OPTION_RULES, EngineConfig
from aserve.core.errors import ConfigError
from aserve.core.layout import Footprint, stretched
from aserve.core.rules import MAX_INT, Rules, flag, integer, number

OPTIONS: Final = (
    *("block_size", "enable_prefix_caching", "long_prefill_token_threshold", "max_model_len", "max_num_batched_tokens"),
    *("max_num_queued_reqs", "max_num_seqs", "preemption_mode", "scheduler_delay_factor", "scheduling_policy"),
    *("target_itl_ms", "watermark"),
)
"""Options of an engine that a scheduler is made of."""
DECIDED: Final = ("itl_factor", "max_in_flight", "num_blocks", "num_host_blocks", "plans_behind_prompts")
"""What an engine decides by itself."""
SPEED: Final = "speed"
"""How much faster everybody comes."""
NAMES: Final = (*OPTIONS, *DECIDED, SPEED)

RULES: Final = Rules(
    lambda message, _field: ConfigError(message),
    {
        "itl_factor": number(1.0, 1000.0),
        "max_in_flight": integer(1, 16),
        "num_blocks": integer(2, MAX_INT),
        "num_host_blocks": integer(0, MAX_INT),
        "plans_behind_prompts": flag,
        SPEED: number(0.0, 1e6, low_open=True),
    },
)


def check_name(name: str) -> None:
    """Raise `ConfigError` for what cannot be changed, with the nearest that can."""
    if name not in NAMES:
        nearest = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"unknown name {name}; {hint}")


def changed(config: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these changes. With blocks of another size there are as many as take the same memory.

    Raises `ConfigError`, naming the field, for values out of bounds and for those that do not go together.
    """
    values = {name: (OPTION_RULES if name in OPTIONS else RULES).check(name, value) for name, value in changes.items()}
    values.pop(SPEED, None)
    if "block_size" in values and values["block_size"] not in BLOCK_SIZES:
        raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {values['block_size']}")
    if "block_size" in values and "num_blocks" not in values:
        values["num_blocks"] = (config.num_blocks - 1) * config.block_size // values["block_size"] + 1
    if values.get("enable_prefix_caching") and not config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching: recorded without, so that it is not known what prompts share")
    after = msgspec.structs.replace(config, **values)
    if after.max_in_flight > 2 and any(after.kv_windows):
        raise ConfigError(f"max_in_flight: 2 at most with sliding windows, got {after.max_in_flight}")
    if after.preemption_mode == "swap" and not after.num_host_blocks:
        raise ConfigError("preemption_mode swap needs num_host_blocks, and there are none")
    budget = after.max_num_batched_tokens
    chunk = min(after.long_prefill_token_threshold or budget, budget)
    needed = Footprint(after.kv_windows, after.block_size, stretched(chunk, budget)).peak(after.max_model_len)
    if needed > after.num_blocks - 1:
        raise ConfigError(
            f"num_blocks: {after.num_blocks} hold no sequence of max_model_len {after.max_model_len}, "
            f"which takes {needed}, and the null block one more"
        )
    return after
