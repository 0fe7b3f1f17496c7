"""Replicas: what the ingress knows of those that answer. Ray's handle is one way to be that (handle.py)."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Protocol

import msgspec

from aserve.core.errors import UnavailableError
from aserve.ray.carried import Carried, Item
from aserve.routing import Ask

NO_ASK: Final = Ask(id="")


class ReplicaLost(Exception):
    """The replica that had a request is gone, or could not be reached. replica: its name, where it is known."""

    def __init__(self, replica: str = "") -> None:
        super().__init__(replica)
        self.replica = replica


class Target(msgspec.Struct, frozen=True):
    """To whom a request may go. only: to that replica. avoid: to those only where there are no others."""

    only: str = ""
    avoid: tuple[str, ...] = ()


ANYWHERE: Final = Target()


class LostAnswerError(UnavailableError):
    """The replica that was answering is gone; what is missing of the answer cannot be told."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("the replica that was answering is gone; the answer ends here, and may be asked for again")


class Replicas(Protocol):
    """All of one deployment."""

    def respond(self, carried: Carried, ask: Ask, target: Target) -> AsyncGenerator[Item]:
        """One replica's answer as it comes; which, is the router's to say. Leaving the iteration cancels it there.

        Raises `ReplicaLost` when the replica is gone, before the answer or in it, and `UnavailableError` where there is
        none that `target.only` names.
        """
        ...

    async def of_all(self, method: str, *arguments: Any) -> Sequence[Any]:
        """What a method of each replica returns, of those that answer."""
        ...
