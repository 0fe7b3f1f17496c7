"""The queue, in the order of a policy."""

import pytest

from aserve.core.ids import BlockHash, SeqId
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.preemption import choose_victims
from aserve.scheduler.queue import SequenceQueue, WaitingQueue, first_come_first_served
from aserve.scheduler.sequence import Sequence
from tests.scheduler.sync_loop import request


def sequence_of(seq_id: int, arrival_s: float) -> Sequence:
    wanted = request(f"r{seq_id}", (0,), arrival_s=arrival_s)
    key = first_come_first_served(wanted, SeqId(seq_id))
    return Sequence(SeqId(seq_id), wanted, BlockTable(BlockHash(bytes(32))), key, 10)


def queue_of(*arrivals_s: float) -> SequenceQueue:
    queue = SequenceQueue()
    for seq_id, arrival_s in enumerate(arrivals_s):
        queue.add(sequence_of(seq_id, arrival_s))
        queue.check()
    return queue


def test_the_earlier_arrival_goes_first_and_of_equals_the_one_added_first():
    queue = queue_of(2.0, 1.0, 2.0, 0.5, 1.0)
    assert [sequence.id for sequence in queue] == [3, 1, 4, 0, 2]
    assert (queue.first.id, queue.last.id, len(queue)) == (3, 2, 5)


def test_any_sequence_can_be_taken_out():
    queue = queue_of(1.0, 1.0, 1.0)
    for sequence in list(queue)[::-2]:
        queue.remove(sequence)
    assert [sequence.id for sequence in queue] == [1]


def test_taking_out_one_that_is_not_in_is_our_own_bug():
    queue = queue_of(1.0, 3.0)
    with pytest.raises(AssertionError, match="I14"):
        queue.remove(sequence_of(7, 2.0))


def test_the_last_may_leave_while_all_are_visited():
    queue = queue_of(1.0, 2.0, 3.0)
    seen = []
    for sequence in queue:
        seen.append(sequence.id)
        if sequence.id == 0:
            queue.remove(queue.last)
    assert seen == [0, 1]


def test_check_notices_a_key_that_changed():
    queue = queue_of(1.0, 2.0)
    queue.first.sort_key = (9.0, 0)
    with pytest.raises(AssertionError, match="I14: out of order"):
        queue.check()


def test_the_victim_is_the_newest_even_if_it_asked_itself():
    queue = queue_of(1.0, 2.0)
    assert choose_victims(queue, queue.first) == [queue.last]
    assert choose_victims(queue, queue.last) == [queue.last]


def test_a_victim_is_never_older_than_who_gains_by_it():
    queue = queue_of(1.0, 2.0)
    newcomer = sequence_of(2, 3.0)
    with pytest.raises(AssertionError, match="I16"):
        choose_victims(queue, newcomer)


def test_a_newcomer_finds_as_large_a_share_of_what_waits_as_goes_before_it():
    """Prompts of 1, 2, 3 and 4 tokens, of which the third came back: three of four go before who comes at 2.5."""
    queue = WaitingQueue()
    assert queue.ahead_of(request("n", (0,)), (0.0, 9)) == (0, 0.0, 0.0)
    for seq_id in range(4):
        wanted = request(f"r{seq_id}", (0,) * (seq_id + 1), arrival_s=float(seq_id))
        key = first_come_first_served(wanted, SeqId(seq_id))
        sequence = Sequence(SeqId(seq_id), wanted, BlockTable(BlockHash(bytes(32))), key, 10)
        sequence.num_preemptions = int(seq_id == 2)
        queue.add(sequence)
    assert queue.ahead_of(request("n", (0,)), (2.5, 9)) == (3, 0.75 * 3, 0.75 * 7)
    queue.remove(queue.first)
    queue.remove(queue[1])
    assert queue.ahead_of(request("n", (0,)), (9.0, 9)) == (2, 2, 6)
