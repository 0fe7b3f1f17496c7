"""The lobby: connections that are read from all together, every few milliseconds, not each when something comes.

    event loop --- watches --> Connection --- refused --> Lobby: an epoll of its own, which nobody waits for
                                   '<------- let in ---------'

Bytes that come on a connection wake the event loop, which takes the processor from the thread that computes, and both
find their caches cold: that costs far more than a refusal. So where one was refused, and more of the same is to be
expected, bytes lie in the kernel until it is time. Knows descriptors, and nothing of what is read.
"""

import select
from contextlib import suppress
from typing import Protocol


class Guest(Protocol):
    """A connection whose transport does not read meanwhile."""

    def read(self) -> None:
        """Take what there is to read, be it the end."""
        ...

    def leave_lobby(self) -> None:
        """Be watched by the event loop again."""
        ...


class Lobby:
    """Those who are read from together, by their descriptors."""

    def __init__(self) -> None:
        self._guests: dict[int, Guest] = {}
        self._poll: select.epoll  # while there is a guest

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, descriptor: int, guest: Guest) -> None:
        """From now on it is read from by `read`."""
        if not self._guests:
            self._poll = select.epoll()
        self._poll.register(descriptor, select.EPOLLIN)
        self._guests[descriptor] = guest

    def leave(self, descriptor: int, guest: Guest) -> None:
        """No longer, whoever has its descriptor now, should it have been closed."""
        if self._guests.get(descriptor) is guest:
            del self._guests[descriptor]
            with suppress(OSError):  # it is closed
                self._poll.unregister(descriptor)
            if not self._guests:
                self._poll.close()

    def read(self) -> None:
        """Read from all who have something to read."""
        if self._guests:
            for descriptor, _ in self._poll.poll(0, len(self._guests)):
                if (guest := self._guests.get(descriptor)) is not None:
                    guest.read()

    def empty(self) -> None:
        """Have all leave."""
        for guest in tuple(self._guests.values()):
            guest.leave_lobby()
