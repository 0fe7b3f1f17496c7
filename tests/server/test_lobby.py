"""Connections that are read from together: alone, over socket pairs, and behind the doors of a full server."""

import asyncio
import os
import socket

import pytest

from aserve.server.door import Doors
from aserve.server.http1 import hypercorn_config
from aserve.server.lobby import Lobby
from tests.server.test_door import POST, full
from tests.server.wire import request, until


class Reading:
    """A guest that reads all, and leaves at the end."""

    def __init__(self, lobby: Lobby, sock: socket.socket) -> None:
        self.lobby, self.descriptor = lobby, sock.fileno()
        self.received: list[bytes] = []
        lobby.enter(self.descriptor, self)

    def read(self) -> None:
        self.received.append(os.read(self.descriptor, 100))
        if not self.received[-1]:
            self.leave_lobby()

    def leave_lobby(self) -> None:
        self.lobby.leave(self.descriptor, self)


@pytest.fixture
def pairs():
    pairs = [socket.socketpair() for _ in range(3)]
    yield pairs
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_who_has_something_to_read_is_called_and_nobody_else(pairs):
    """Catches a read that would block, one that is forgotten, and an end that is not told."""
    lobby = Lobby()
    guests = [Reading(lobby, ours) for ours, _ in pairs]
    lobby.read()
    assert [guest.received for guest in guests] == [[], [], []]
    pairs[0][1].send(b"a")
    pairs[2][1].close()
    lobby.read()
    assert [guest.received for guest in guests] == [[b"a"], [], [b""]]
    assert len(lobby) == 2
    lobby.empty()
    pairs[1][1].send(b"b")
    lobby.read()
    assert (len(lobby), guests[1].received) == (0, [])


def test_a_descriptor_that_somebody_else_has_now_stays_his(pairs):
    """Catches a guest who takes the place of one whose descriptor was closed, and loses it when that one leaves."""
    lobby = Lobby()
    first = Reading(lobby, pairs[0][0])
    pairs[0][0].close()
    ours, theirs = pairs[1]
    taken = socket.socket(fileno=os.dup2(ours.fileno(), first.descriptor))
    second = Reading(lobby, taken)
    first.leave_lobby()
    theirs.send(b"a")
    lobby.read()
    assert (second.received, len(lobby)) == ([b"a"], 1)
    taken.close()
    second.leave_lobby()
    assert not lobby


def test_a_guest_who_leaves_while_others_are_read_from_is_not_called(pairs):
    """Catches a connection that is read from after it was ended, by the answer to another's request."""
    lobby = Lobby()
    guests = [Reading(lobby, ours) for ours, _ in pairs]
    for guest in guests:
        guest.read = lambda: [other.leave_lobby() for other in guests]
    for _, theirs in pairs:
        theirs.send(b"a")
    lobby.read()
    assert [guest.received for guest in guests] == [[], [], []]


async def test_what_waits_is_looked_at_every_fourth_time_that_the_lobby_is_read_from(pairs):
    """Catches a look for each read, and a flood in which nobody is looked at, or read from, in time."""
    doors = Doors(None, hypercorn_config())
    doors.are_busy = lambda: True
    guest = Reading(doors.lobby, pairs[0][0])
    pairs[0][1].send(b"a")
    num_reads, looks = 0, []

    def read() -> None:
        nonlocal num_reads
        num_reads += 1
        doors.wait(lambda: looks.append(num_reads))

    guest.read = read
    doors.look_later()
    await until(lambda: len(looks) > 6)
    assert looks == [1, 5, 5, 5, 5, 9, 9, 9, 9]
    guest.leave_lobby()
    await until(lambda: doors._timer is None)


async def test_one_whose_reading_fails_does_not_keep_the_others_from_being_read(pairs):
    """Catches a fault of one connection after which the lobby is never read from again."""
    doors, faults = Doors(None, hypercorn_config()), []
    doors.are_busy = lambda: True
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    broken, other = (Reading(doors.lobby, ours) for ours, _ in pairs[:2])

    def fail() -> None:
        broken.leave_lobby()
        raise KeyError("a fault")

    broken.read = fail
    for _, theirs in pairs[:2]:
        theirs.send(b"a")
    doors.look_later()
    await until(lambda: other.received == [b"a"])
    assert [type(fault) for fault in faults] == [KeyError]
    other.leave_lobby()
    await until(lambda: doors._timer is None)


async def test_who_was_refused_is_read_from_in_the_lobby_until_nobody_is_refused():
    """Catches a flood whose every request wakes the event loop, and a lobby that is kept for nobody."""
    async with full() as place:
        doors = place.site.connections.doors
        client = await place.site.connect()
        assert (await client.ask(POST)).status == 429
        (guest,) = doors.lobby._guests.values()
        assert not guest._transport.is_reading()
        assert (await client.ask(POST)).status == 429
        assert [*doors.lobby._guests.values()] == [guest]
        await until(lambda: not doors.lobby)
        assert not doors.are_busy()
        assert guest._transport.is_reading()
        assert doors._timer is None
        assert (await client.ask(POST)).status == 429
        await place.let_go()


async def test_what_is_not_refused_leaves_the_lobby_at_once():
    """Catches an application that is not told when its client leaves, since nobody reads what he says."""
    async with full() as place:
        doors = place.site.connections.doors
        client = await place.site.connect()
        for answered in (request(b"/health"), request(b"/v1/models"), b"GET / HTTP/9\r\n\r\n"):
            assert (await client.ask(POST)).status == 429
            assert len(doors.lobby) == 1
            assert (await client.ask(answered)).status in (200, 400, 505)
            assert not doors.lobby
        await place.let_go()


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_who_leaves_the_server_from_the_lobby_is_noticed(ending):
    """Catches a connection, with its task, that is open until its idle time is over."""
    async with full() as place:
        client = await place.site.connect()
        assert (await client.ask(POST)).status == 429
        if ending == "close":
            await client.close()
        else:
            client.reset()
        await place.site.quiet(num_open=2)
        assert not place.site.connections.doors.lobby
        await place.let_go()
