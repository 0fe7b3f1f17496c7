"""The states of a sequence and the moves between them, as tables.

WAITING --admitted--> RUNNING --stopped, cancelled, failed--> FINISHED
   ^  ^                | |  ^                                    ^
   |  \\___recomputed___/ |  |                                    |
   |                 swapped out, and back in                    |
   |                     v  |                                    |
   \\___host copy lost__ SWAPPED ______cancelled, WAITING too_____/
"""

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.Enum):
    """WAITING holds no block and no row; RUNNING holds both; SWAPPED holds blocks of the host and no row.

    FINISHED is forgotten by the scheduler.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


LEGAL: Final[Mapping[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.SWAPPED, State.FINISHED}),
    State.SWAPPED: frozenset({State.WAITING, State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


def move(current: State, target: State) -> State:
    """`target`, if `LEGAL` allows it."""
    assert target in LEGAL[current], f"I19: no move from {current.value} to {target.value}"
    return target
