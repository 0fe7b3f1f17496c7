"""What metrics are read of at each scrape, as far as they need to know it: a scheduler's counts and tenants' usage."""

from collections.abc import Mapping
from typing import Protocol

from aserve.core.ids import AdapterId


class SchedulerCounts(Protocol):
    """What is read of the scheduler's statistics: gauges of this moment, and counters since the start.

    num_blocks: all that sequences can hold. num_used_blocks: those that they do hold.
    num_swapped: sequences whose blocks are on the host. num_swap_outs: preemptions that moved them there.
    num_host_kept_blocks: cached blocks that live on in host memory now. num_host_hit_blocks: came back from there.
    step_time_error: of the latest steps' predicted times, as a share of what they took.
    num_drafted_slices, num_drafts, num_accepted_by_position: of drafts, by their place; () where nobody has any.
    num_cache_queries, num_cache_hits: in tokens.
    num_steps_by_tokens: how many steps there were of so many tokens. running_adapters, waiting_adapters: of sequences;
    () where there are none.
    """

    @property
    def num_running(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_waiting(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swapped(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_used_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_preemptions(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swap_outs(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_copied_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swapped_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_queries(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_hits(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_evictions(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_host_kept_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_host_hit_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def step_time_error(self) -> float: ...  # noqa: D102  the class says what each is
    @property
    def num_drafted_slices(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_drafts(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_accepted_by_position(self) -> tuple[int, ...]: ...  # noqa: D102  the class says what each is
    @property
    def num_steps_by_tokens(self) -> Mapping[int, int]: ...  # noqa: D102  the class says what each is
    @property
    def running_adapters(self) -> tuple[AdapterId, ...]: ...  # noqa: D102  the class says what each is
    @property
    def waiting_adapters(self) -> tuple[AdapterId, ...]: ...  # noqa: D102  the class says what each is


class TenantCounts(Protocol):
    """What is read of a tenant: its name, how many of its requests are open, and counters since the start."""

    @property
    def tenant(self) -> str: ...  # noqa: D102  the class says what each is
    @property
    def num_open(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_requests(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_refused(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cached_tokens(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_generated_tokens(self) -> int: ...  # noqa: D102  the class says what each is
