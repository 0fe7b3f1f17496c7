"""What a sequence makes of its request."""

import msgspec
import pytest

from aserve.core.ids import BlockHash, RequestId, SeqId
from aserve.core.outputs import FinishReason
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.kv_cache.table import BlockTable
from aserve.scheduler.queue import first_come_first_served
from aserve.scheduler.sequence import Sequence, row_sampling
from aserve.scheduler.stopping import reason_to_stop

REQUEST = Request(
    id=RequestId("r"),
    prompt_token_ids=(5, 6, 7),
    params=SamplingParams(),
    max_tokens=4,
    seed=11,
    arrival_s=1.5,
    stop_ids=frozenset({1, 2}),
    eos_ids=frozenset({2}),
)


def sequence_of(context_len: int = 100) -> Sequence:
    table = BlockTable(BlockHash(bytes(32)))
    return Sequence(SeqId(3), REQUEST, table, first_come_first_served(REQUEST, SeqId(3)), context_len)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), (1.0, 0, 1.0, 0.0, (), 0)),
        (SamplingParams(temperature=1e-6, top_k=-1, top_p=0.5, min_p=0.1), (0.0, 0, 0.5, 0.1, (), 0)),
        (SamplingParams(temperature=0.7, top_k=20, min_tokens=2), (0.7, 20, 1.0, 0.0, (1, 2), 5)),
    ],
)
def test_the_runner_is_told_how_to_sample_and_what_is_banned_until_when(params, expected):
    sampling = row_sampling(msgspec.structs.replace(REQUEST, params=params))
    assert sampling.columns.seed == 11
    assert (
        *sampling.columns[:4],
        sampling.banned_ids,
        sampling.banned_before,
    ) == expected


def test_nothing_is_banned_where_nothing_ends_the_sequence():
    endless = msgspec.structs.replace(REQUEST, stop_ids=frozenset(), params=SamplingParams(min_tokens=2))
    assert row_sampling(endless).banned_before == 0


def test_a_sequence_is_capped_by_its_request_and_by_the_context():
    assert (sequence_of().max_len, sequence_of().last_position) == (7, 5)
    assert (sequence_of(context_len=5).max_len, sequence_of(context_len=5).last_position) == (5, 3)


def test_a_sequence_may_run_ahead_up_to_its_last_position():
    sequence = sequence_of()
    sequence.num_computed = 5  # the token there may still be in flight
    assert sequence.may_advance()
    sequence.num_computed = 6
    assert not sequence.may_advance()
    assert sequence.free_until == 5, "up to there nobody asks"


def test_a_sequence_that_awaits_its_tokens_may_advance_once_they_have_landed():
    sequence = sequence_of()
    sequence.await_tokens()
    for num_computed in range(3):  # the prompt is known
        sequence.num_computed = num_computed
        assert sequence.may_advance()
    sequence.num_computed = 3
    assert sequence.free_until < 0, "it is always asked"
    assert not sequence.may_advance(), "the token at position 3 is in flight"
    sequence.token_ids.append(8)
    assert sequence.may_advance()
    sequence.token_ids.extend((8, 8, 8))
    sequence.num_computed = 6
    assert not sequence.may_advance(), "the limit holds for it too"


def test_a_sequence_need_not_await_its_tokens_for_ever():
    sequence = sequence_of()
    sequence.await_tokens()
    sequence.await_tokens(awaits=False)
    sequence.num_computed = 4
    assert sequence.may_advance()
    assert sequence.free_until == sequence.last_position


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ((8, 2), (FinishReason.STOP, None)),  # the model's own ending
        ((8, 1), (FinishReason.STOP, 1)),  # one that the request asked for
        ((8, 8, 8, 8), (FinishReason.LENGTH, None)),
        ((8, 8, 8, 1), (FinishReason.STOP, 1)),  # both at once
    ],
)
def test_a_sequence_ends_at_an_ending_token_or_at_its_length(token_ids, expected):
    sequence = sequence_of()
    sequence.token_ids.extend(token_ids)
    assert reason_to_stop(sequence, token_ids[-1]) == expected


def test_there_must_be_a_reason_to_stop():
    sequence = sequence_of()
    sequence.token_ids.append(8)
    with pytest.raises(AssertionError, match="no reason to stop <Sequence 3 waiting 0/4 row=None"):
        reason_to_stop(sequence, 8)
