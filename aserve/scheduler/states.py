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


class Hold(enum.Enum):
    """Why the first of those who wait was not admitted by a plan.

    MEMORY: too few blocks are free. ROWS: as many run as may. BUDGET: the step computes as many tokens as it may, or it
    has preempted somebody. ADAPTERS: no slot is free for its adapter. TURN: others of its tenant or of its request run,
    and it is somebody else's turn. SIBLING: it forks from one that has not computed what they share. SWAPPED: those who
    are swapped out come first. PACE: newcomers are gathered (scheduler_delay_factor). STREAMS: more prompt tokens would
    delay those who decode. FLIGHT: a step that it had a part in has not landed.
    """

    MEMORY = "memory"
    ROWS = "rows"
    BUDGET = "budget"
    ADAPTERS = "adapters"
    TURN = "turn"
    SIBLING = "sibling"
    SWAPPED = "swapped"
    PACE = "pace"
    STREAMS = "streams"
    FLIGHT = "flight"


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
