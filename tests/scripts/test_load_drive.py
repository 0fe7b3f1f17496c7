"""Rounds of load on something that answers at once: who is sent when, what is counted, and what a failure costs."""

import asyncio
import random
from typing import Any

import pytest

from aserve.load.answers import Sample
from aserve.load.arrivals import Arrival
from aserve.load.drive import HttpSender, Round, Target, closed_loop, open_loop, together
from aserve.load.http import Answer, AnswerError
from aserve.load.prompts import Prompts

Request = tuple[list[int], int]


class Place:
    """Something to put load on."""

    prompts = Prompts(range(1000))

    def __init__(self, speaker: "Speaker") -> None:
        self._speaker = speaker

    def sender(self) -> "Speaker":
        return self._speaker


class Speaker:
    """The sender of such a place. An answer has as many tokens as were asked for, but three at most.

    In place of the answers to prompts of 7 and of 8 tokens the connection breaks, and something comes that is none.
    """

    num_retries = 2

    def __init__(self, wait_s: float = 0.0) -> None:
        self.sent: list[Request] = []
        self.num_open = self.most_open = 0
        self.is_closed = False
        self._wait_s = wait_s

    def prepare(self, ids: list[int], num_out: int) -> Request:
        return ids, num_out

    async def send(self, prepared: Request) -> Request:
        self.sent.append(prepared)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(self._wait_s)
        self.num_open -= 1
        if len(prepared[0]) == 7:
            raise OSError("gone")
        return prepared

    def read(self, received: Request, due_s: float) -> Sample:
        ids, num_out = received
        if len(ids) == 8:
            raise AnswerError("no tokens")
        return Sample(due_s, due_s + 0.5, due_s + 1.0, len(ids), min(num_out, 3))

    def close(self) -> None:
        self.is_closed = True


def arrivals(*lengths: tuple[int, int]) -> list[Arrival]:
    return [Arrival(0.0, num_in, num_out) for num_in, num_out in lengths]


def counts(done: Round) -> dict[str, Any]:
    return {
        "lengths": [(sample.num_in, sample.num_out) for sample in done.samples],
        "failures": done.failures,
        "num_asked": done.num_asked,
        "num_short": done.num_short,
        "num_retries": done.num_retries,
    }


async def test_so_many_clients_send_their_requests_one_after_another():
    speaker = Speaker()
    done = await closed_loop(Place(speaker), arrivals((2, 1), (3, 4), (7, 1), (8, 1), (5, 5)), 2, random.Random(0))
    assert counts(done) == {
        "lengths": [(2, 1), (3, 3), (5, 3)],
        "failures": ["OSError: gone", "no tokens"],
        "num_asked": 5,
        "num_short": 2,
        "num_retries": 2,
    }
    assert done.late_s == [pytest.approx(0.5)] * 3
    assert [(len(ids), num_out) for ids, num_out in speaker.sent] == [(2, 1), (3, 4), (7, 1), (8, 1), (5, 5)]
    assert (speaker.most_open, speaker.is_closed) == (2, True)
    assert 0.0 <= done.cpu_s < 0.3
    assert 0.0 < done.wall_s < 60.0


async def test_requests_are_sent_at_their_times_however_many_are_open():
    speaker = Speaker(wait_s=0.05)
    comes = [Arrival(0.04, 2, 1), Arrival(0.0, 3, 1), Arrival(0.02, 4, 1)]
    done = await open_loop(Place(speaker), comes, random.Random(0))
    assert sorted(len(ids) for ids, _ in speaker.sent) == [2, 3, 4]
    dues = [sample.due_s for sample in done.samples]
    assert [due_s - dues[1] for due_s in dues] == pytest.approx([0.04, 0.0, 0.02], abs=1e-6)
    assert done.wall_s >= 0.09


async def test_rounds_of_one_salt_share_the_beginnings_of_prompts():
    first = []
    for salt in (1, 1, 2):
        speaker = Speaker()
        await open_loop(Place(speaker), [Arrival(0.0, 9, 1, (3,), block_tokens=8)], random.Random(salt), salt)
        first.append(speaker.sent[0][0][:8])
    assert first[0] == first[1] != first[2]


def test_rounds_that_ran_together_are_one():
    one, other = Round(2, wall_s=3.0, cpu_s=0.5), Round(3, failures=["no"], late_s=[0.1], wall_s=2.0, cpu_s=0.7)
    one.num_short, other.num_short, one.num_retries, other.num_retries = 1, 2, 3, 4
    one.samples, other.samples = ([Sample(0.0, 0.0, 1.0, 2, end)] for end in (1, 2))
    found = together([one, other])
    assert counts(found) == {
        "lengths": [(2, 1), (2, 2)],
        "failures": ["no"],
        "num_asked": 5,
        "num_short": 3,
        "num_retries": 7,
    }
    assert (found.wall_s, found.cpu_s, found.late_s) == (3.0, 0.7, [0.1])
    one.check()
    with pytest.raises(AnswerError, match="1 of 5 requests failed: no"):
        found.check()


async def test_a_servers_sender_asks_as_it_wants_to_be_asked_and_reads_what_it_says():
    target = Target("http://host:1", Prompts(range(10)), stream=False, keep_alive=False, timeout_s=3.0)
    sender = target.sender()
    assert isinstance(sender, HttpSender)
    head, _, body = sender.prepare([1, 2], 5).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions ")
    assert b"Connection: close" in head
    assert b"Connection: close" not in Target(target.url, target.prompts).sender().prepare([1], 5)
    assert body == target.body([1, 2], 5)
    answer = b'{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}'
    sample = sender.read(Answer(1.0, 200, [(2.0, answer)]), due_s=0.5)
    assert (sample.due_s, sample.num_out, sample.latency_s) == (0.5, 4, 1.5)
    assert sender.num_retries == 0
    sender.close()
