"""Ranks: processes that are told, watched and ended. Their processes here have no model, and start in a moment."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aserve.core.config import Facts
from aserve.core.errors import AdapterError, CheckpointError, InsufficientMemoryError, RankLostError
from aserve.core.ids import AdapterId, Row, SeqId
from aserve.core.plan import RowInit, RowSampling, SeqSlice, StepPlan
from aserve.kernels.ops import PADDING_ID
from aserve.models.sharding import Group
from aserve.parallel.leader import Team
from aserve.runner.following import followed, masked_rows
from aserve.runner.groups import GroupBrokenError, MeetingFile
from aserve.runner.rank_messages import (
    Begin,
    Load,
    Loaded,
    Measured,
    PipeReader,
    PipeWriter,
    Ready,
    Run,
    decode_told,
    frame,
)
from aserve.runner.ranks import Ranks, python_command
from aserve.runner.warm_up import CONTROLS, AnyToken
from tests.simulation.worlds import config_of

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NOTICED_S = 2.0
PLAN = StepPlan(1, (SeqSlice(SeqId(0), Row(0), 5, 1, (), (), 1),))


class Answers:
    """Ranks, of whom each has so many bytes."""

    def __init__(self, *num_bytes: int) -> None:
        self._measured = [Measured(num) for num in num_bytes]

    def answers(self, kind: type[Measured]) -> list[Measured]:
        assert kind is Measured
        return self._measured


def test_the_cache_is_what_the_least_has_room_for() -> None:
    facts = Facts(device="cpu", context_len=100, kv_bytes_per_token=8, kv_budget_bytes=500)
    for others, least in (((700, 300), 300), ((700, 600), 500), ((700,), 500)):
        assert Team(ranks=Answers(*others)).least(facts).kv_budget_bytes == least


class Short:
    """Ranks that are told to begin, and one of which finds no room for its runner."""

    def __init__(self) -> None:
        self.told: list[Begin] = []

    def tell(self, message: Begin) -> None:
        self.told.append(message)

    def answers(self, kind: type[Ready]) -> list[Ready]:
        assert kind is Ready
        assert self.told, "they are told before they are waited for"
        raise InsufficientMemoryError("rank 1 has no room for its KV cache")


def test_where_one_cannot_make_its_runner_beginning_raises_that() -> None:
    """Caught: not waiting until all are ready, so that the first step reaches a rank that has no runner yet."""
    short = Short()
    with pytest.raises(InsufficientMemoryError, match="rank 1 has no room"):
        Team(ranks=short).begin(config_of())
    assert short.told == [
        Begin(num_blocks=64, block_size=8, num_host_blocks=0, max_num_seqs=8, max_model_len=128, num_drafts=0)
    ]


class NoGroup(Group):
    """Remembers that it was left."""

    was_left = False

    def leave(self) -> None:
        self.was_left = True


@contextmanager
def ranks(*behaviours: str) -> Iterator[Ranks]:
    group = NoGroup()
    commands = [python_command("tests.parallel.little_rank", behaviour) for behaviour in behaviours]
    made = Ranks(commands, group, MeetingFile())
    pids = made.pids
    try:
        yield made
    finally:
        made.close()
        assert group.was_left
        assert not any(is_there(pid) for pid in pids)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def lost_within(made: Ranks, seconds: float) -> str:
    """What is said of the rank that is lost, as soon as it is."""
    end_s = time.monotonic() + seconds
    while made.lost is None:
        assert time.monotonic() < end_s, "nobody has noticed"
        time.sleep(0.01)
    return made.lost.message


def test_they_answer_each_and_end_when_all_is_closed() -> None:
    with ranks("well", "well", "well") as made:
        assert made.answers(Loaded) == [Loaded()] * 3
        made.run(PLAN, recovers=False)
        made.load(AdapterId(1), "folder")
        assert made.lost is None


def test_what_one_cannot_load_is_raised_as_it_would_be_here() -> None:
    with ranks("well", "cannot load") as made, pytest.raises(CheckpointError, match="no such folder"):
        made.answers(Loaded)


def test_an_adapter_that_one_cannot_read_is_the_requests_error() -> None:
    with ranks("well", "no adapters") as made, pytest.raises(AdapterError, match="where it is"):
        made.load(AdapterId(1), "where it is")


def test_one_that_takes_its_time_to_end_is_not_killed() -> None:
    """Catches a deadline that has passed before it is waited for."""
    with ranks("slow to end", "slow to end") as made:
        made.answers(Loaded)
        processes = [each.process for each in made._processes]
    assert [process.returncode for process in processes] == [0, 0]


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.runner.ranks.CLOSE_S", 0.2)
    with ranks("does not end") as made:
        made.answers(Loaded)


@pytest.mark.parametrize(
    ("signum", "words"),
    [(signal.SIGKILL, r"rank 2 .* was killed by signal 9 \(SIGKILL\)"), (signal.SIGSTOP, "rank 2 .* stands still")],
)
def test_one_that_is_killed_or_stopped_is_noticed(signum: int, words: str) -> None:
    """And takes the others with it: who waits for it in a step waits in vain."""
    with ranks("well", "well") as made:
        made.answers(Loaded)
        os.kill(made.pids[1], signum)
        begun_s = time.monotonic()
        with pytest.raises(RankLostError, match=words):
            raise RankLostError(lost_within(made, 5 * NOTICED_S))
        assert time.monotonic() - begun_s < NOTICED_S
        with pytest.raises(RankLostError, match=words):
            made.run(PLAN, recovers=True)


def test_one_that_exits_is_noticed() -> None:
    with ranks("exits") as made:
        made.answers(Loaded)
        made.run(PLAN, recovers=False)
        assert "ended with exit code 3" in lost_within(made, 5 * NOTICED_S)


def test_why_a_step_failed_is_what_the_rank_says_that_failed_first() -> None:
    with ranks("out of memory") as made:
        made.answers(Loaded)
        made.run(PLAN, recovers=False)
        assert isinstance(made.cause_of(GroupBrokenError()), InsufficientMemoryError)
        own = ZeroDivisionError()
        assert made.cause_of(own) is own


def test_a_failure_that_was_taken_back_is_nobodys_any_more() -> None:
    """Catches a step that is called failed because of one before the recovery, of which was told late."""
    with ranks("out of memory") as made:
        made.answers(Loaded)
        made.run(PLAN, recovers=True)
        with pytest.raises(AdapterError, match="late"):  # it answers in order
            made.load(AdapterId(1), "late")
        made.check()


def test_a_plan_for_others_brings_no_mask_and_nothing_that_only_sampling_needs() -> None:
    sampling = RowSampling(banned_ids=(1,), banned_before=9, num_logprobs=2, named_ids=(PADDING_ID,), controls=CONTROLS)
    init = RowInit(Row(3), SeqId(8), sampling, (4, 5), mask=AnyToken(7))
    plan = StepPlan(4, PLAN.slices, (init,))
    told = decode_told(memoryview(bytes(frame(Run(followed(plan), masked_rows(plan)))[4:])))
    assert isinstance(told, Run)
    assert told.masked == (Row(3),)
    [row] = told.plan.inits
    assert (row.block_ids, row.mask, row.sampling.num_logprobs) == ((4, 5), None, None)
    assert row.sampling.controls is not None, "its row takes no graph, there as here"
    assert not row.sampling.controls.logit_bias
    assert (row.sampling.banned_ids, row.sampling.banned_before) == ((1,), 9)
    assert told.plan.slices == plan.slices


def test_frames_arrive_whole_however_they_are_cut() -> None:
    read_fd, write_fd = os.pipe()
    reader, writer = PipeReader(read_fd), PipeWriter(write_fd)
    messages = [Load(ticket, AdapterId(ticket), "x" * ticket) for ticket in (0, 3, 200)]
    framed = b"".join(frame(message) for message in messages)
    found = []
    for start in range(0, len(framed), 7):
        writer.write(bytearray(framed[start : start + 7]))
        found += reader.read() or []
    assert [decode_told(payload) for payload in found] == messages
    os.close(write_fd)
    assert reader.read() is None
    os.close(read_fd)


def test_where_memory_has_no_files_ranks_meet_at_one_that_goes_with_the_meeting(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "memfd_create")
    meeting = MeetingFile()
    assert Path(meeting.path).exists()
    assert meeting.fds == ()
    meeting.close()
    assert not Path(meeting.path).exists()
    meeting.close()
