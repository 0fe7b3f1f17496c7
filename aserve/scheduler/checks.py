"""The invariants that concern sequences, for tests: their numbers are those of `Scheduler`."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

from aserve.core.ids import RequestId, SeqId
from aserve.core.plan import SeqSlice, StepPlan
from aserve.kv_cache.checks import check_hashes
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.residents import Residents
from aserve.scheduler.sequence import Sequence


def check_sequences(
    sequences: Mapping[SeqId, Sequence], requests: Mapping[RequestId, list[Sequence]], residents: Residents
) -> None:
    """Assert I19, those known by id, those listed by request and those that are somewhere are the same, and
    `Residents.check`.
    """
    residents.check()
    alive = {*residents.waiting, *residents.running, *residents.swapped}
    assert set(sequences.values()) == alive, "I19: a sequence is lost or undead"
    listed = [sequence for members in requests.values() for sequence in members]
    assert len(listed) == len(alive) == len(alive.intersection(listed)), "I19: a request is lost or undead"


def check_running(
    running: Iterable[Sequence], in_flight: Iterable[StepPlan], cache: PagedCache, context_len: int
) -> None:
    """Assert what `_check_running` does, of each that runs."""
    for sequence in running:
        flying = [piece for plan in in_flight for piece in plan.slices if piece.seq_id == sequence.id]
        _check_running(sequence, flying, cache, context_len)


def _check_running(sequence: Sequence, flying: Several[SeqSlice], cache: PagedCache, context_len: int) -> None:
    """Assert I4, I6, I17, I18, I22 and I23. flying: its slices in flight, oldest first."""
    num_tokens = len(sequence.token_ids) + sum(piece.num_samples for piece in flying)
    is_beam = sequence.group is not None and sequence.group.beams is not None
    assert sequence.num_computed < num_tokens + is_beam, f"I18: {sequence!r}"
    assert num_tokens <= sequence.max_len + is_beam, f"I18: {sequence!r}"
    assert sequence.max_len <= context_len, f"I17: {sequence!r}"
    assert sequence.num_computed <= sequence.table.capacity, f"I18: {sequence!r} has no block to write to"
    num_landed = flying[0].start if flying else sequence.num_computed
    block_size = cache.block_size
    assert sequence.table.num_sealed * block_size <= num_landed, f"I6: {sequence!r} sealed too early"
    check_hashes(sequence.table, sequence.token_ids, block_size)
    assert sequence.table.num_shared * block_size <= sequence.num_computed, f"I4: {sequence!r} shares too much"
    cache.check_visible(sequence.table, num_landed)
