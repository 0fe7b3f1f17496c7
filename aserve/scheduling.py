"""The scheduler that a configuration describes."""

from collections.abc import Callable
from typing import Final

from aserve.core.config import EngineConfig
from aserve.drafters import make_proposer
from aserve.kv_cache.host_memory import has_host_tier
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import Policy, first_come_first_served, priority_with_ageing
from aserve.scheduler.scheduler import Scheduler

PRIORITY_AGEING_S: Final = 10.0
"""Under the priority policy a level is worth this many seconds of waiting."""


def make_scheduler(config: EngineConfig, make: Callable[..., Scheduler] = Scheduler) -> Scheduler:
    """A scheduler with the limits and the policies of a configuration. make: a Scheduler of another kind."""
    policies: dict[str, Policy] = {
        "fcfs": first_come_first_served,
        "priority": priority_with_ageing(PRIORITY_AGEING_S),
        "fair": priority_with_ageing(PRIORITY_AGEING_S),
    }
    return make(
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len + int(config.pools),  # a vector takes the place of a token behind the last
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
        graph_sizes=config.graph_sizes,
        proposer=make_proposer(config),
        max_loras=config.max_loras,
        has_row_state=config.pools and not config.enable_prefix_caching,  # sums of states, or an encoder's tokens
    )
