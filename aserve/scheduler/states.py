"""The states of a sequence and the moves between them, as tables.

WAITING --admitted--> RUNNING --stopped, cancelled, failed--> FINISHED
   ^  \\_________________|__________cancelled__________________/^
   \\____preempted______/
"""

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.Enum):
    """WAITING holds no block and no row; RUNNING holds both; FINISHED is forgotten by the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


LEGAL: Final[Mapping[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


def move(current: State, target: State) -> State:
    """`target`, if `LEGAL` allows it."""
    assert target in LEGAL[current], f"I19: no move from {current.value} to {target.value}"
    return target
