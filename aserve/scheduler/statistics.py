"""Statistics: what the scheduler tells about itself."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from aserve.core.ids import AdapterId
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.admission import Admission
from aserve.scheduler.drafting import DraftCounts
from aserve.scheduler.residents import Residents


class StepSizes:
    """How many steps were planned of so many tokens. Decodes are alike for long: a run of them is counted at its end.

    num_tokens: of each step in the run that goes on.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._since_id = 0
        self._counts: Counter[int] = Counter()

    def become(self, num_tokens: int, step_id: int) -> None:
        """From this step on they are of so many tokens."""
        self._counts[self.num_tokens] += step_id - self._since_id
        self.num_tokens, self._since_id = num_tokens, step_id

    def counts(self, next_id: int) -> Mapping[int, int]:
        """By tokens, of all steps before that one."""
        return +(self._counts + Counter({self.num_tokens: next_id - self._since_id}))


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of this moment, and counters (num_preemptions and below) since the start.

    num_running, num_waiting, num_swapped: sequences. num_host_used_blocks: of the swap space.
    num_blocks: all that sequences can hold. num_used_blocks: those that they do hold; merely cached ones are free.
    num_preemptions: of sequences; num_swap_outs: those of them that were swapped out and not recomputed.
    num_cache_queries, num_cache_hits: tokens that sequences were admitted with, and those of them found in the cache.
    num_copied_blocks: copied on write. num_swapped_blocks: moved to the host or back.
    num_host_kept_blocks: of the swap space, those that the host tier has now. num_host_hit_blocks: came back from it.
    queue_time_s: from arrival to first admission, summed over the num_admitted sequences.
    step_time_error: of what was predicted of the latest steps, as a share of what they took.
    num_drafted_slices, num_drafts, num_accepted_by_position: see `DraftCounts`; the last is () where nobody has drafts.
    num_steps_by_tokens: how many steps were planned of so many tokens.
    num_waiting_tokens: yet to be computed, of sequences that wait and of the prompts of those that run.
    tokens_per_s: of full steps, in which nobody more found room; None before one was measured.
    running_adapters, waiting_adapters: of sequences that run or are swapped out, and that wait.
    """

    num_running: int
    num_waiting: int
    num_swapped: int = 0
    num_in_flight: int
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_host_used_blocks: int = 0
    num_preemptions: int
    num_swap_outs: int = 0
    num_admitted: int
    queue_time_s: float
    num_cache_queries: int
    num_cache_hits: int
    num_cache_evictions: int
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0
    num_host_kept_blocks: int = 0
    num_host_hit_blocks: int = 0
    step_time_error: float = 0.0
    num_drafted_slices: int = 0
    num_drafts: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    num_steps_by_tokens: Mapping[int, int] = {}
    num_waiting_tokens: int = 0
    tokens_per_s: float | None = None
    running_adapters: tuple[AdapterId, ...] = ()
    waiting_adapters: tuple[AdapterId, ...] = ()

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]."""
        return self.num_used_blocks / self.num_blocks


def snapshot(
    cache: PagedCache,
    residents: Residents,
    admission: Admission,
    drafts: DraftCounts,
    num_steps_by_tokens: Mapping[int, int],
    num_in_flight: int,
    step_time_error: float,
) -> Statistics:
    """The counts of this moment."""
    counts = cache.statistics()
    running_adapters, waiting_adapters = residents.adapters()
    return Statistics(
        num_running=len(residents.running),
        num_waiting=len(residents.waiting),
        num_swapped=len(residents.swapped),
        num_in_flight=num_in_flight,
        num_blocks=cache.num_blocks,
        num_used_blocks=counts.num_used,
        num_free_blocks=counts.num_free,
        num_host_used_blocks=counts.num_host_used,
        num_preemptions=residents.num_preemptions,
        num_swap_outs=residents.num_swap_outs,
        num_admitted=admission.num_admitted,
        queue_time_s=admission.queue_time_s,
        num_cache_queries=counts.num_queried_tokens,
        num_cache_hits=counts.num_hit_tokens,
        num_cache_evictions=counts.num_evictions,
        num_copied_blocks=residents.num_copied_blocks,
        num_swapped_blocks=residents.num_swapped_blocks,
        num_host_kept_blocks=counts.num_host_kept,
        num_host_hit_blocks=counts.num_host_hits,
        step_time_error=step_time_error,
        num_drafted_slices=drafts.num_slices,
        num_drafts=drafts.num_drafts,
        num_accepted_by_position=tuple(drafts.accepted_by_position),
        num_steps_by_tokens=num_steps_by_tokens,
        num_waiting_tokens=residents.num_waiting_tokens,
        tokens_per_s=admission.throughput.tokens_per_s,
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
    )
