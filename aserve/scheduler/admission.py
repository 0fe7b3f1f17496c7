"""Who may start: what fits at all, what fits now, and when it is time.

A sequence is admitted with blocks for all of its tokens or not at all, so that a long prompt is never preempted
half way through its chunks by its own growth. The watermark keeps some blocks free for those that run; it is waived
when nobody else runs, or a large prompt would wait for ever (I13).
"""

from collections.abc import Container
from math import ceil

from aserve.core.errors import ContextLengthError, InvalidRequestError, OverloadedError
from aserve.core.ids import SeqId
from aserve.core.request import Request
from aserve.kv_cache.paged_cache import Copy, PagedCache
from aserve.scheduler.queue import Arrival, Waiting
from aserve.scheduler.sequence import Sequence, SortKey
from aserve.scheduler.states import State
from aserve.scheduler.throughput import Throughput

MAX_RETRY_AFTER_S = 60


class Admission:
    """The limits of one engine. `watermark` is a share of the blocks; lengths are in tokens.

    max_num_queued: requests that wait at most, under the fair policy of each tenant; None is without bound.
    """

    def __init__(
        self, cache: PagedCache, *, max_model_len: int, max_num_seqs: int, watermark: float, max_num_queued: int | None
    ) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_num_queued = max_num_queued
        self.num_spare_blocks = int(watermark * cache.num_blocks)
        self.context_len = cache.footprint.longest(cache.num_blocks, max_model_len)
        """Tokens that a sequence can have, prompt and answer together."""
        self.throughput = Throughput()
        self.num_admitted = 0
        self.queue_time_s = 0.0

    # What fits at all.

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise `ContextLengthError` if a prompt could never be computed and answered with at least one token (I17)."""
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if num_prompt_tokens < self.context_len:
            return
        if self.context_len == self._max_model_len:
            limit = f"the maximum context length is {self._max_model_len} tokens"
        else:
            limit = f"the KV cache holds {self.context_len} tokens"
        raise ContextLengthError(f"{limit}, but the prompt has {num_prompt_tokens} and one must be left to generate")

    def context_len_for(self, request: Request) -> int:
        """Tokens that a sequence of this request can have. Raises as `check_fits`.

        Beams advance together, so all of them must fit at once: the prompt's full spans, which they share, and what
        each has of its own. With sliding windows all is its own: a beam that was preempted may find no other that still
        has the prompt's end, and is computed from the beginning. Other sequences of a group can wait for one another.
        """
        num_prompt = len(request.prompt_token_ids)
        self.check_fits(num_prompt)
        beam = request.params.beam
        if beam is None:
            return self.context_len
        if beam.width > self._max_num_seqs:
            raise InvalidRequestError(
                f"the beam width must be at most the number of sequences that run at once ({self._max_num_seqs}), "
                f"got {beam.width}",
                "n",
            )
        footprint = self._cache.footprint
        num_common = 0 if footprint.has_windows else (num_prompt - 1) // self._cache.block_size
        context_len = footprint.longest(
            self._cache.num_blocks, self._max_model_len, width=beam.width, num_common=num_common
        )
        if num_prompt >= context_len:
            raise ContextLengthError(
                f"the KV cache holds {self.context_len} tokens, in which {beam.width} beams can have {context_len} "
                f"each, but the prompt has {num_prompt} and one must be left to generate"
            )
        return context_len

    def check_queue(self, arrival: Arrival, sort_key: SortKey, waiting: Waiting, num_before: int = 0) -> None:
        """Raise `OverloadedError` when as many requests wait for their first admission as may, or so many that this
        one would not be admitted before its deadline. Nobody is refused for a time that has not been measured.

        num_before: requests of its tenant that have come and do not wait yet. They count as requests, and take no time.
        """
        if self._max_num_queued is None and arrival.deadline_s is None:
            return
        ahead = waiting.ahead_of(arrival, sort_key)
        wait_s = self.throughput.seconds_for(ahead.num_sequences, ahead.num_prompt_tokens)
        num_queued = ahead.num_queued + num_before
        if self._max_num_queued is not None and num_queued >= self._max_num_queued:
            if wait_s is None:
                wait_s = self.queue_time_s / self.num_admitted if self.num_admitted else 0.0
            raise OverloadedError(
                f"{num_queued} requests are waiting, which is the most there may be", _retry_after_s(wait_s)
            )
        if wait_s is None or arrival.deadline_s is None:
            return
        left_s = arrival.deadline_s - arrival.arrival_s
        if wait_s > left_s:
            raise OverloadedError(
                f"the wait would be about {wait_s:.1f} s, and the request has {left_s:.1f} s until its deadline",
                _retry_after_s(wait_s - left_s),
            )

    # What fits now.

    def admit(self, sequence: Sequence, *, settling: Container[SeqId], others_run: bool) -> tuple[Copy, ...] | None:
        """Take blocks for all tokens of a waiting sequence. Returns what must be copied for it; None: it must wait.

        What it has in common with a running sequence it forks from that, unless more of it is in the prefix cache. A
        prompt that is to be scored does neither: a score needs the position before its token computed, and so does one
        of which each token has a vector.
        settling: sequences that the step being planned sets up or computes a chunk of. Their blocks hold what that step
        makes only when it has run, so whoever would fork from one of them waits for the next plan.
        others_run: whether sequences run that have nothing to do with it.
        """
        num_spare_blocks = self.num_spare_blocks if others_run else 0
        reads_cache = sequence.num_scored >= sequence.num_prompt and not sequence.request.per_token
        forked = fork_source(sequence) if reads_cache else None
        if forked is not None:
            source, num_common = forked
            num_matched = self._cache.num_cached(sequence.table, sequence.token_ids)
            if num_common > num_matched and self._cache.can_fork(source.table, num_common):
                if not _is_ready(source, num_common, settling):
                    return None
                return self._fork(sequence, source, num_common, num_spare_blocks)
        hits = self._cache.acquire(
            sequence.table, sequence.token_ids, num_spare_blocks=num_spare_blocks, reads_cache=reads_cache
        )
        if hits is None:
            return None
        num_matched = len(hits) // self._cache.num_groups * self._cache.block_size
        self._admitted(sequence, num_matched, len(hits), num_cached=num_matched)
        return ()

    def _fork(
        self, sequence: Sequence, source: Sequence, num_common: int, num_spare_blocks: int
    ) -> tuple[Copy, ...] | None:
        copies = self._cache.fork(
            source.table, sequence.table, num_common, len(sequence.token_ids), num_spare_blocks=num_spare_blocks
        )
        if copies is None:
            return None
        num_bound = -(-num_common // self._cache.block_size) * self._cache.num_groups
        is_sibling = sequence.group is not None and source.group is sequence.group
        num_cached = source.num_cached if is_sibling else num_common
        self._admitted(sequence, num_common, num_bound, num_cached=num_cached)
        return copies

    def _admitted(self, sequence: Sequence, num_computed: int, num_bound: int, *, num_cached: int) -> None:
        assert num_computed < len(sequence.token_ids), f"I9: nothing is left to compute of {sequence!r}"
        sequence.num_prefill = len(sequence.token_ids)
        sequence.num_computed = num_computed
        sequence.num_bound = num_bound
        sequence.origin = None
        if sequence.num_preemptions == 0:
            sequence.num_cached = num_cached

    def count(self, sequence: Sequence, now: float) -> None:
        """A sequence was admitted at `now`; its first admission ends its time in the queue."""
        if sequence.num_preemptions == 0:
            self.num_admitted += 1
            sequence.queued_s = now - sequence.request.arrival_s
            self.queue_time_s += sequence.queued_s


def _retry_after_s(wait_s: float) -> int:
    return min(max(1, ceil(wait_s)), MAX_RETRY_AFTER_S)


def fork_source(sequence: Sequence) -> tuple[Sequence, int] | None:
    """A running sequence with whom a waiting one has a past in common, and how many positions of it."""
    if sequence.group is not None:
        running = sequence.group.running()
        if running:
            return max(running, key=lambda member: member.num_computed), sequence.group.num_common
    origin = sequence.origin
    if origin is not None and origin.state is State.RUNNING:
        return origin, sequence.num_prompt - 1
    return None


def awaits_source(sequence: Sequence, settling: Container[SeqId]) -> bool:
    """Whether the one that it would fork from has not computed what they have in common."""
    forked = fork_source(sequence)
    return forked is not None and not _is_ready(*forked, settling)


def _is_ready(source: Sequence, num_common: int, settling: Container[SeqId]) -> bool:
    return source.id not in settling and source.num_bound is None and source.num_computed >= num_common


class Pace:
    """scheduler_delay_factor: newcomers wait until their prompts fill a step, as vLLM V0 let them.

    After a step with prompts nobody is admitted until the one who has waited longest has done so for `delay_factor`
    times as long as that step took. 0.0 never delays.
    """

    def __init__(self, delay_factor: float) -> None:
        self.delays = delay_factor > 0.0
        """Whether anybody is ever delayed."""
        self._delay_factor = delay_factor
        self._last_plan_s = 0.0
        self._prompt_step_s = 0.0
        self._last_had_prompt = False

    def next_step(self, now: float) -> None:
        """A step is about to be planned, at `now`: as long as that has the one before it taken."""
        if self._last_had_prompt:
            self._prompt_step_s = now - self._last_plan_s
        self._last_plan_s, self._last_had_prompt = now, False

    def allows(self, now: float, waiting_since_s: float) -> bool:
        """Whether one that has been waiting since then may start at `now`. Seconds of the engine's clock."""
        return (
            not self.delays
            or self._last_had_prompt
            or now - waiting_since_s >= self._delay_factor * self._prompt_step_s
        )

    def admitted(self) -> None:
        """Somebody was admitted to the step being planned: others may join."""
        self._last_had_prompt = True
