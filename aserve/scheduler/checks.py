"""The invariants that concern a running sequence, for tests: their numbers are those of `Scheduler`."""

from collections.abc import Sequence as Several

from aserve.core.plan import SeqSlice
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.sequence import Sequence


def check_running(sequence: Sequence, flying: Several[SeqSlice], cache: PagedCache, context_len: int) -> None:
    """Assert I4, I6, I17, I18 and I24. flying: its slices in flight, oldest first."""
    num_tokens = len(sequence.token_ids) + sum(piece.samples for piece in flying)
    is_beam = sequence.group is not None and sequence.group.beams is not None
    assert sequence.num_computed < num_tokens + is_beam, f"I18: {sequence!r}"
    assert num_tokens <= sequence.max_len + is_beam, f"I18: {sequence!r}"
    assert sequence.max_len <= context_len, f"I17: {sequence!r}"
    assert sequence.num_computed <= sequence.table.capacity, f"I18: {sequence!r} has no block to write to"
    num_landed = flying[0].start if flying else sequence.num_computed
    block_size = cache.block_size
    assert sequence.table.num_sealed * block_size <= num_landed, f"I6: {sequence!r} sealed too early"
    assert sequence.table.num_shared * block_size <= sequence.num_computed, f"I4: {sequence!r} shares too much"
    cache.check_visible(sequence.table, num_landed)
